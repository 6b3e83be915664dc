"""The convention and the shape of a module's masks, found by what masks do to its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch

from mha.implementations.adapters.called import forward_of
from mha.implementations.adapters.kernel_axes import function_of
from mha.implementations.adapters.mask_forms import PaddingConvention
from mha.implementations.adapters.named_options import annotation_of, may_be_mask
from mha.implementations.adapters.names import LENGTH_NAMES, MEMORY_WORDS, QUERY_WORDS, words_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.causal_flags import not_causal
from mha.implementations.inference.mask_effects import (
    fitting_conventions,
    hides_queries,
    takes_pairs,
)
from mha.implementations.inference.mask_objects import attribute_read
from mha.implementations.inference.mask_ranks import find_integers, find_ranks
from mha.implementations.inference.nearest_masks import (
    Format,
    nearest_format,
    with_nearest_booleans,
)
from mha.implementations.inference.nearest_projections import (
    agree,
    all_with_formula,
    with_formula,
)
from mha.implementations.inference.probes import CONVENTIONS, OF_MERGED_HEADS, SHAPES
from mha.implementations.inference.projections import Unclear, Undeclarable
from mha.implementations.inference.token_positions import moves_positions
from mha.spec import Claims

# So many other masks are tried beside the mask.
MOST_BESIDE = 2


class Ambiguous(Unclear):
    """Masks that two formats explain, each in part.

    choices: the candidate with each of the formats.
    """

    def __init__(self, message: str, candidate: Candidate, *formats: Format) -> None:
        super().__init__(message)
        self.choices = [_with_format(candidate, each) for each in formats]


def find_masks(candidate: Candidate) -> Candidate:
    """Return the candidate with its masks, read in another way if only that explains what they do.

    Raises Unclear if each mask of a common shape raises, or has an effect that no convention
    explains.
    """
    candidate = _with_mask_object(candidate)
    masked, problem = None, None
    try:
        masked = _with_masks(candidate)
    except Unclear as unclear:
        problem = unclear
    if masked and not masked.assumed:
        return masked
    takes_no_mask = masked is None and not isinstance(problem, Ambiguous)
    for other in _other_readings(candidate, takes_no_mask=takes_no_mask):
        with suppress(Unclear):
            tried = _with_masks(other)
            if not tried.assumed:
                return tried
    if masked and not masked.ignores_masks:
        return masked
    if candidate.signature.guesses_mask:
        return candidate.claiming(masks=())
    if masked:
        _require_no_other_mask(candidate)
        return masked
    assert problem
    raise problem


def _with_mask_object(candidate: Candidate) -> Candidate:
    """Return the candidate with the attribute that it reads of its mask, if that is an object."""
    name, declared = candidate.signature.mask, candidate.declared
    if name is None or "Tensor" in annotation_of(declared.forward_parameters[name]):
        return candidate
    function = declared.constructor if candidate.is_kernel else forward_of(declared.built_class)
    attribute = attribute_read(function_of(function), name)
    return candidate.declaring(mask_attribute=attribute) if attribute else candidate


def _other_readings(candidate: Candidate, *, takes_no_mask: bool) -> Iterator[Candidate]:
    """Yield other readings of a class, in which its masks may have their effect.

    takes_no_mask: whether none can be given in the first reading.
    """
    if not candidate.is_kernel:
        yield from not_causal(candidate)
    causal = candidate.formula.causal
    if candidate.explained and causal and not candidate.signature.is_causal:
        # It is causal without a mask, and masks take the place of that.
        formula = replace(candidate.formula, causal=None)
        yield candidate.trying(formula=formula).declaring(causal_by_default=causal)
    if takes_no_mask and candidate.cross_attention == "memory" and candidate.signature.one_input:
        # As self-attention, masks may be of one length.
        alone = with_formula(candidate.claiming(cross_attention=False))
        if alone:
            yield alone
    if candidate.is_kernel and candidate.trial.dtype == torch.float64:
        # It may add a mask of its inputs' dtype to scores of float32, and raise for the product.
        yield candidate.trying(dtype=torch.float32)


def _beside_others(candidate: Candidate) -> Candidate | None:
    """Return the candidate with masks that act only if others are given with them, if these do."""
    others = _other_masks(candidate)
    if not others:
        return None
    for shapes in product(*map(_shapes_beside, others)):
        tried = candidate.declaring(beside=dict(zip(others, shapes, strict=True)))
        exact = _exact_format(_formats(tried))
        if exact:
            return _with_format(tried, exact)
    return None


def _require_no_other_mask(candidate: Candidate) -> None:
    """Raise Unclear for masks without effect beside others that are None: both may be needed."""
    others = ", ".join(_other_masks(candidate))
    if others:
        raise Unclear(
            f"{candidate.signature.mask} has no effect while {others} is None; if both are needed,"
            " pass call=... that gives both, or mask=None to judge it without masks"
        )


def _other_masks(candidate: Candidate) -> list[str]:
    """Return the arguments that may be masks beside the mask, and that calls leave out."""
    signature = candidate.signature
    known = {signature.mask, candidate.declared.signature_with(padding=True).padding}
    others = []
    for name, parameter in candidate.declared.forward_parameters.items():
        if parameter.default is None and may_be_mask(parameter) and name not in known:
            others.append(name)
    return others[:MOST_BESIDE]


def _shapes_beside(name: str) -> tuple[str, ...]:
    """Return the shapes that another mask may have: that of queries, or, by its name, of pairs."""
    if not QUERY_WORDS.isdisjoint(words_of(name)):
        return ("b l",)
    if not MEMORY_WORDS.isdisjoint(words_of(name)):
        return ("b s",)
    return ("b l", "b s", "b 1 l s", "l s")


def _with_masks(candidate: Candidate) -> Candidate:
    """Return the candidate with the format that explains what masks do, or else the nearest one.

    Raises Unclear as `find_masks` does.
    """
    name = candidate.signature.mask
    if name is None:
        return candidate.claiming(masks=())
    formats = _formats(candidate)
    exact = _exact_format(formats)
    if exact:
        part = _in_part(candidate, formats, exact)
        misread = _misread(exact) or with_nearest_booleans(exact)
        return _with_format(candidate, part or misread or exact)
    beside = _beside_others(candidate)
    if beside:
        return beside
    more = _more_than_hiding_keys(formats)
    if more:
        return replace(candidate.claiming(masks=()), more_by_mask=more)
    near = nearest_format(formats)
    if near is None:
        raise _unclear(candidate, name)
    return _with_format(candidate, near)


def _more_than_hiding_keys(formats: Sequence[Candidate]) -> str:
    """Return what masks of padding do beside hiding keys, which the contract does not have."""
    if any(map(takes_pairs, formats)):
        return ""
    if any(map(hides_queries, formats)):
        return "hides the queries of padding too, whose outputs mean nothing"
    if any(map(moves_positions, formats)):
        return "moves the positions of later tokens; they get what they get without the hidden ones"
    return ""


def _exact_format(formats: Sequence[Candidate]) -> Format | None:
    """Return the first format that explains what masks do, if one does."""
    for each in formats:
        conventions = fitting_conventions(each)
        if conventions:
            return Format(each, conventions)
    return None


def _with_format(candidate: Candidate, read: Format) -> Candidate:
    """Return the candidate with a format of masks, and the claims about them."""
    chosen = read.candidate.declared
    masked = candidate.declaring(
        mask=read.conventions[0],
        mask_shape=chosen.mask_shape,
        mask_numbers=chosen.mask_numbers,
        padding=chosen.padding,
    )
    if "additive" in read.conventions:
        masked = masked.claiming(masks={"bool", "float"})
    claims = Claims(masks=masked.claims.get("masks", {"bool"}))
    masked = masked.claiming(**masked.declared.masks.limits(claims))
    masked = replace(masked, assumed=read.assumed, ignores_masks=read.ignored)
    return find_integers(find_ranks(masked))


def _unclear(candidate: Candidate, name: str) -> Unclear:
    """Return what is unclear about a mask of this name, and what to declare."""
    tried = candidate.declaring(mask="keep")
    tried.call(tried.probes[0].inputs, mask=tried.probes[0].mask("bhls", causal=False))
    raised = tried.calls.raised
    if raised and raised.is_of_code:
        return Undeclarable(f"each call with a mask raises {raised}")
    what = f"a mask of any common shape does as {name!r}"
    if raised:
        what = f"{what} (a boolean one of (B, H, L, S) raises {raised})"
    return Unclear(
        f"no convention explains what {what}; pass"
        " mask='keep', 'drop' or 'additive', and mask_shape=..., or mask=None to judge it without"
        " masks"
    )


def with_required_mask(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that give the formula with a mask of some format in each call.

    There are none if one of them can do without a mask.
    """
    for tried in given_a_mask(candidates):
        matching = all_with_formula(tried)
        if matching:
            return matching
    return []


def given_a_mask(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Yield the candidates with a mask of each format in each call, which allows everything.

    Nothing, if one of them can do without a mask.
    """
    if not candidates or candidates[0].signature.mask is None:
        return
    if not all(each.problem for each in candidates):
        return
    for shape, numbers in product(_shapes(candidates[0]), (False, True)):
        for convention in CONVENTIONS[:2] if numbers else CONVENTIONS:
            mask = {"mask": convention, "mask_shape": shape, "mask_numbers": numbers}
            given = [each.declaring(**mask, mask_required=True) for each in candidates]
            if _changes_what_is_raised(candidates, given):
                yield given


def _changes_what_is_raised(plain: Sequence[Candidate], given: Sequence[Candidate]) -> bool:
    """Return whether a call with a mask raises something else than one without, or nothing.

    One of each layout is called: what code raises is the same for other projections.
    """
    called = set[str]()
    for without, masked in zip(plain, given, strict=True):
        layout = masked.declared.layout
        if layout in called:
            continue
        called.add(layout)
        returned = masked.call_plainly(masked.probes[0].inputs) is not None
        if returned or masked.calls.raised != without.calls.raised:
            return True
    return False


def _formats(candidate: Candidate) -> list[Candidate]:
    """Return the candidate with each format of masks but its convention, the most general first."""
    separate = candidate.declared.signature_with(padding=True)
    shapes = _shapes(candidate)
    # Beside a mask of padding, masks that differ between queries come first: others leave the
    # argument for masks unused. If that is only guessed to be one, they are not tried.
    beside_padding = [shape for shape in shapes if "l" in SHAPES[shape]]
    if not separate.guesses_mask:
        beside_padding += [shape for shape in shapes if "l" not in SHAPES[shape]]
    shapes_of: dict[PaddingConvention | None, list[str | None]] = {None: shapes}
    if separate.padding and separate.mask:
        shapes_of = {"drop": beside_padding, "keep": beside_padding, None: shapes}
    return [
        candidate.declaring(mask_shape=shape, mask_numbers=numbers, padding=padding)
        for padding in shapes_of
        for numbers in (False, True)
        for shape in shapes_of[padding]
    ]


def _shapes(candidate: Candidate) -> list[str | None]:
    """Return the shapes that its masks may have: by their name, they may be numbers of keys."""
    counts = candidate.signature.mask in LENGTH_NAMES
    shapes = [shape for shape in SHAPES if counts == (shape is not None and "s" not in shape)]
    if candidate.declared.layout == "(b h) l d":
        return shapes
    if candidate.config.n_heads == 1:  # an axis of items and heads is one of items
        return [shape for shape in shapes if shape is None or "(b h)" not in shape]
    return [shape for shape in shapes if shape not in OF_MERGED_HEADS]


def _in_part(candidate: Candidate, formats: Sequence[Candidate], exact: Format) -> Format | None:
    """Return a format with a padding mask of its own that counts for some items only.

    None if the exact one has a padding mask, or no other format is such a one.

    Raises Ambiguous for masks of each item that count for some items only, and for a padding mask
    without any effect: either may be meant.
    """
    declared = exact.candidate.declared
    if declared.padding or not exact.candidate.explained:
        return None
    per_item = "b" in SHAPES[declared.mask_shape]
    more_general = []
    for each in formats:
        is_of_items = "b" in SHAPES[each.declared.mask_shape] and not per_item
        if each.declared.padding or is_of_items:
            more_general.append(each)
    near = nearest_format(more_general, partly=True)
    if near is None:
        return None
    if not near.candidate.declared.padding:
        raise Ambiguous(
            f"masks that all items share count as mask_shape={declared.mask_shape!r}, but those of"
            " each item for some items only; declare which is meant,"
            f" mask_shape={declared.mask_shape!r} or {near.candidate.declared.mask_shape!r}",
            candidate,
            exact,
            near,
        )
    if near.ignored:
        name = declared.signature_with(padding=True).padding
        raise Ambiguous(
            f"its padding mask {name} has no effect; declare padding=None to leave it out, or"
            " padding='drop'",
            candidate,
            exact,
            near,
        )
    return near


def _misread(exact: Format) -> Format | None:
    """Return the most general format instead of one of four axes, if broadcast masks are misread.

    A class that takes no such mask raises.
    """
    declared = exact.candidate.declared
    has_four_axes = declared.mask_shape in ("b h l s", "b 1 l s")
    if not has_four_axes or declared.mask_numbers or declared.padding:
        return None
    general = exact.candidate.declaring(mask_shape=None, mask=exact.conventions[0])
    probe = general.probes[0]
    mask = general.mask_of(probe, "ls")
    shared = general.call(probe.inputs, mask=mask[:1, :1])
    expanded = general.call(probe.inputs, mask=mask)
    if shared is None or expanded is None or agree(shared, expanded):
        return None
    why = "assumed: masks of one item count for some items only"
    return Format(exact.candidate.declaring(mask_shape=None), exact.conventions, why)
