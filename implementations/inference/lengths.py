"""The number of keys, and of queries, that a call may give for each item of a dense batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from mha.implementations.adapters.names import LENGTH_NAMES
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import policy_shown
from mha.implementations.inference.probes import Probe, is_close
from mha.implementations.inference.score_options import BY_NAME_ALONE, has_causal_calls
from mha.spec import Options
from mha.spec.claims import Alignment

Lengths = Literal["keys", "both"]
WORDS: dict[Lengths, str] = {
    "keys": "of the keys of each item, and places count from them",
    "both": "of the keys and the queries of each item, and places count from them",
}
# Without lengths, and with them.
NOT_CLAIMED = "not judged: causal calls are aligned {} without them, and {} with them"
# The claims about a mask, which one of lengths replaces.
OF_MASKS = (
    "prefix_masks",
    "per_head_mask",
    "per_query_mask",
    "per_item_mask",
    "mask_ranks",
    "empty_row",
)


def find_lengths(candidate: Candidate) -> Candidate:
    """Claim lengths of the items, if parameters have their names.

    Where they have another effect, or none, they are claimed as their names say, and fail then.
    """
    names = candidate.claiming(lengths="keys").names_of("key_lengths")
    if not (candidate.explained and names) or candidate.declared.layout.startswith("t "):
        return candidate
    if candidate.declared.mask and candidate.signature.mask in names:
        return _in_place_of_a_mask(candidate)
    choices: list[Lengths] = ["both", "keys"] if candidate.names_of("query_lengths") else ["keys"]
    for lengths in choices:
        tried = candidate.claiming(lengths=lengths)
        if tried.passes(_follows):
            return _noted(tried, lengths)
    for lengths in choices:
        if candidate.claiming(lengths=lengths).passes(_follows_from_the_other_end):
            return _noted(candidate, lengths, NOT_CLAIMED.format(*_both_ends(candidate)))
    return _by_name(candidate, choices)


def _by_name(candidate: Candidate, choices: Sequence[Lengths]) -> Candidate:
    """Claim lengths as their names say, unless these may count otherwise, as of masks."""
    names = candidate.claiming(lengths="keys").names_of("key_lengths")
    for lengths in choices:
        tried = candidate.claiming(lengths=lengths)
        probe = tried.probes[0]
        is_taken = tried.call(probe.inputs, **_given(tried, probe).arguments) is not None
        if is_taken and {*LENGTH_NAMES}.isdisjoint(names):
            return _noted(tried, lengths, BY_NAME_ALONE)
    return candidate


def _in_place_of_a_mask(candidate: Candidate) -> Candidate:
    """Claim lengths, where causal places count from them, in the place of a mask of so many keys.

    Without causal calls, both say the same.
    """
    if not (candidate.declared.masks.counts_keys and candidate.signature.is_causal):
        return candidate
    without = candidate.declaring(mask=None, mask_shape=None, mask_required=False)
    without = without.without_claims(*OF_MASKS).claiming(masks=(), lengths="keys")
    if candidate.claimed("causal") != "bottom_right" or not without.passes(_follows):
        return candidate
    return _noted(replace(without, empty_row=None), "keys")


def _noted(candidate: Candidate, lengths: Lengths, evidence: str = "tested") -> Candidate:
    names = [*candidate.claiming(lengths=lengths).names_of("key_lengths")]
    if lengths == "both":
        names += candidate.names_of("query_lengths")
    noted = candidate.noting("items", f"{', '.join(names)}: {WORDS[lengths]}", evidence)
    return _with_policy_of_empty_items(noted)


def _with_policy_of_empty_items(candidate: Candidate) -> Candidate:
    """Claim what an item without a key gets, where no mask and no causal call has shown it."""
    if not candidate.claimed("lengths") or "empty_row" in candidate.claims:
        return candidate
    probe = candidate.probes[0]
    queries, keys = probe.lengths
    lengths = [keys] * probe.batch
    lengths[0] = 0
    options = Options(key_lengths=tuple(lengths))
    if candidate.claimed("lengths") == "both":
        options = options.change(query_lengths=(queries,) * probe.batch)
    emptied = torch.zeros(probe.batch, queries, dtype=torch.bool)
    emptied[0] = True
    policy = policy_shown(candidate, probe, emptied, options.arguments)
    if policy in ("nan", "uniform"):
        return replace(candidate.claiming(empty_row=policy), empty_row=policy)
    return candidate


def _given(candidate: Candidate, probe: Probe) -> Options:
    """Return the options of a call with lengths: all of the first item, fewer of the others."""
    queries, keys = probe.lengths
    options = Options(key_lengths=tuple(_falling(keys, probe.batch)))
    if candidate.claimed("lengths") == "both":
        options = options.change(query_lengths=tuple(_falling(queries, probe.batch)))
    return options


def _falling(length: int, batch: int) -> Iterator[int]:
    """Yield a length of each item, and 1 at least."""
    for item in range(batch):
        yield max(1, length - item)


def _follows(tried: Candidate, probe: Probe) -> bool:
    """Return whether calls with lengths give what the formula gives, with each causal flag."""
    return _gives(tried, probe, tried.claimed("causal"))


def _follows_from_the_other_end(tried: Candidate, probe: Probe) -> bool:
    """Return whether they do if causal calls are aligned otherwise with lengths than without."""
    if not has_causal_calls(tried):
        return False
    _, other = _both_ends(tried)
    return _gives(tried, probe, other)


def _both_ends(candidate: Candidate) -> tuple[Alignment, Alignment]:
    """Return how causal calls are aligned, and the other alignment."""
    if candidate.claimed("causal") == "top_left":
        return "top_left", "bottom_right"
    return "bottom_right", "top_left"


def _gives(tried: Candidate, probe: Probe, alignment: Alignment | None) -> bool:
    """Return whether calls with lengths give the formula with causal calls aligned like this."""
    flags = {tried.plainly_causal}
    if tried.signature.is_causal and alignment:
        flags.add(True)
    options, (queries, _) = _given(tried, probe), probe.lengths
    for flag in flags:
        result = tried.call(probe.inputs, **options.change(is_causal=flag).arguments)
        causal = alignment if flag != tried.plainly_causal else tried.formula.causal
        formula = replace(tried.formula, causal=causal, options=options)
        expected = formula(probe.inputs, tried.weights, None)
        # Queries after those of an item, and those without a key, are of other clauses.
        present = expected.isfinite().all(-1)
        for item, own in enumerate(options.query_lengths or ()):
            present[item, own:queries] = False
        if result is None or not is_close(result.output[present], expected[present]):
            return False
    return True
