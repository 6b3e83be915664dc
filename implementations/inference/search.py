"""What is found of a class or a kernel once its formula is known: finders, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from mha.implementations.inference.alibi import ALIBI, BUILT_IN_ALIBI
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.causal import built_not_causal, find_causal
from mha.implementations.inference.chunks import CHUNK
from mha.implementations.inference.decoding import find_decoding
from mha.implementations.inference.dropout import find_dropout
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.kernel_forms import code_of_constructor
from mha.implementations.inference.kernel_options import (
    find_contiguous,
    find_forward_only,
    find_key_heads,
    find_unrecorded,
    find_value_width,
    require_one_key_head,
)
from mha.implementations.inference.lengths import find_lengths
from mha.implementations.inference.lse import find_lse
from mha.implementations.inference.mask_search import Ambiguous, find_masks
from mha.implementations.inference.options import (
    find_dtypes,
    find_grouped_query,
    find_kv_widths,
    find_numbers_of_heads,
    find_own_head_dim,
    find_rounding,
    keep_biases_that_can_be_called,
    keep_own_head_dim,
)
from mha.implementations.inference.packing import find_packing
from mha.implementations.inference.products import find_products
from mha.implementations.inference.projections import Asked, Unclear
from mha.implementations.inference.score_options import find_scale
from mha.implementations.inference.self_attention import find_self_attention
from mha.implementations.inference.sinks import SINKS
from mha.implementations.inference.sizes import (
    claim_all_sizes,
    claim_explained_sizes,
    claim_more_lengths,
    find_longest,
    find_widths,
)
from mha.implementations.inference.softcaps import SOFTCAP, find_place_beside_slopes
from mha.implementations.inference.weights import find_weights
from mha.implementations.inference.windows import WINDOW


def _always(candidate: Candidate) -> bool:
    del candidate
    return True


def _of_modules(candidate: Candidate) -> bool:
    return not candidate.is_kernel


def _of_kernels(candidate: Candidate) -> bool:
    return candidate.is_kernel


def _in_few_sizes(candidate: Candidate) -> bool:
    return candidate.trial.few_sizes


def _in_all_sizes(candidate: Candidate) -> bool:
    return not candidate.trial.few_sizes


def _on_a_gpu(candidate: Candidate) -> bool:
    return candidate.is_kernel and "devices" in candidate.claims


def _of_explained_kernels(candidate: Candidate) -> bool:
    return candidate.is_kernel and candidate.explained


def _of_own_key_heads(candidate: Candidate) -> bool:
    return _of_explained_kernels(candidate) and "multi_query" not in candidate.claims


class Finder(NamedTuple):
    """A step of the search: it returns the candidate with what it found, where it applies."""

    find: Callable[[Candidate], Candidate]
    applies: Callable[[Candidate], bool] = _always


MASKS = Finder(find_masks)
# Each one is tried with what those before it have found.
FINDERS = (
    Finder(require_one_key_head, _of_kernels),
    # Other sizes would be refused in the calls of all other finders.
    Finder(claim_explained_sizes, _in_few_sizes),
    Finder(find_contiguous, _of_kernels),
    Finder(claim_more_lengths, _of_modules),
    Finder(find_own_head_dim, _of_modules),
    # Masks decide whether there are calls that a causal flag can change, and rows without a key.
    Finder(built_not_causal, _of_modules),
    MASKS,
    Finder(find_causal),
    Finder(find_empty_row),
    Finder(find_weights),
    Finder(keep_own_head_dim),
    Finder(find_grouped_query),
    Finder(find_kv_widths),
    Finder(keep_biases_that_can_be_called),
    Finder(find_dropout),
    Finder(find_dtypes),
    Finder(find_scale),
    Finder(WINDOW.find),
    Finder(SOFTCAP.find),
    Finder(SINKS.find),
    Finder(ALIBI.find),
    Finder(BUILT_IN_ALIBI.find),
    Finder(find_place_beside_slopes),
    Finder(find_lengths, _of_kernels),
    Finder(find_packing, _of_kernels),
    Finder(CHUNK.find),
    Finder(find_rounding),
    Finder(find_products),
    Finder(find_forward_only, _on_a_gpu),
    Finder(find_unrecorded, _of_kernels),
    Finder(find_numbers_of_heads, _of_modules),
    Finder(find_widths, _in_all_sizes),
    Finder(claim_all_sizes, _in_few_sizes),
    Finder(find_longest, _of_modules),
    Finder(find_self_attention, _of_modules),
    Finder(find_decoding, _of_modules),
    Finder(find_key_heads, _of_own_key_heads),
    Finder(find_value_width, _of_own_key_heads),
    Finder(find_lse, _of_explained_kernels),
)


def with_claims(candidate: Candidate) -> Candidate:
    """Return a candidate, whose formula is known, with all its claims and rows.

    Raises Unclear for what is left open; Asked, with the code of both answers, for masks that may
    be read in two ways.
    """
    try:
        return _with_findings(candidate, FINDERS)
    except Ambiguous as error:
        rest = FINDERS[FINDERS.index(MASKS) + 1 :]
        answers = []
        for choice in error.choices:
            with suppress(Unclear):
                declared = _with_findings(choice, rest).declared
                answers.append(declared.line(code_of_constructor(declared)))
        if len(answers) < len(error.choices):
            raise
        raise Asked(f"{error}. Either: {' -- or: '.join(answers)}") from None


def _with_findings(candidate: Candidate, finders: Iterable[Finder]) -> Candidate:
    """Return the candidate with what several finders find."""
    for find, applies in finders:
        if applies(candidate):
            candidate = find(candidate)
    return candidate
