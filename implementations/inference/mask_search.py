"""The convention and the shape of a module's masks, found by what masks do to its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from mha.implementations.adapters.mask_forms import PaddingConvention
from mha.implementations.adapters.names import LENGTH_NAMES
from mha.implementations.inference.candidate import Candidate, Kind
from mha.implementations.inference.causal_flags import not_causal
from mha.implementations.inference.nearest_masks import nearest_format
from mha.implementations.inference.nearest_projections import agree, find_formula
from mha.implementations.inference.probes import CONVENTIONS, SHAPES, Probe, additive, is_close
from mha.implementations.inference.projections import Unclear, Undeclarable
from mha.spec import Claims, MaskConvention
from mha.spec.masks import INTEGERS


def with_masks(candidate: Kind, *, rebuilt: bool = True) -> Kind:
    """Return a candidate whose masks are known, read in another way if only that explains what they
    do.

    rebuilt: whether it may be built otherwise, so that it is not causal.
    """
    masked, problem = replace(candidate, claims=dict(candidate.claims)), None
    try:
        find_mask(masked)
    except Unclear as unclear:
        problem = unclear
    if not problem and not masked.assumed:
        return masked
    for tried in chain(
        not_causal(candidate) if rebuilt else (),
        _replaced(candidate),
        _alone(candidate) if problem else (),
    ):
        with suppress(Unclear):
            find_mask(tried)
            if not tried.assumed:
                return tried
    if candidate.signature.guesses_mask and (problem or masked.ignored):
        return replace(candidate, claims=candidate.claims | {"masks": ()})
    if problem:
        raise problem
    return masked


def _replaced(candidate: Kind) -> Iterator[Kind]:
    """Yield what is causal without a mask, as one whose masks take the place of that."""
    if candidate.explained and candidate.formula.causal and not candidate.signature.is_causal:
        formula, causal = replace(candidate.formula, causal=None), candidate.formula.causal
        yield replace(
            candidate, formula=formula, causal_by_default=causal, claims=dict(candidate.claims)
        )


def _alone(candidate: Kind) -> Iterator[Kind]:
    """Yield what can be called with or without a memory as self-attention, whose masks may be of
    one length.
    """
    if candidate.cross_attention == "memory" and candidate.signature.one_input:
        tried = replace(candidate, claims=candidate.claims | {"cross_attention": False})
        if find_formula(tried):
            yield tried


def find_mask(candidate: Candidate) -> None:
    """Set the convention, shape and claims of masks: those that explain what masks do, or else the
    nearest ones.

    Raises Unclear if each mask of a common shape raises, or has an effect that no convention
    explains.
    """
    name = candidate.signature.mask
    if name is None:
        candidate.claims["masks"] = ()
        return
    formats = _formats(candidate)
    exact, fitting = next(
        ((each, found) for each in formats if (found := _fitting_conventions(each))), (None, [])
    )
    if exact is None and not _takes_pairs(formats) and any(map(_hides_queries, formats)):
        candidate.claims["masks"], candidate.hides_queries = (), True
        return
    near = (
        nearest_format(formats)
        if exact is None
        else _in_part(formats, exact) or _misread(exact, fitting)
    )
    chosen, conventions = near or (exact, fitting)
    if chosen is None:
        raise _unclear(candidate, name)
    candidate.mask, candidate.mask_shape = conventions[0], chosen.mask_shape
    candidate.mask_numbers, candidate.padding, candidate.assumed = (
        chosen.mask_numbers,
        chosen.padding,
        chosen.assumed,
    )
    candidate.claims |= {"masks": {"bool", "float"}} if "additive" in conventions else {}
    candidate.claims |= candidate.masks.limits(
        Claims(masks=candidate.claims.get("masks", {"bool"}))
    )
    _find_ranks(candidate)
    _find_integers(candidate)


def _unclear(candidate: Candidate, name: str) -> Unclear:
    """Return what is unclear about a mask of this name, and what to declare."""
    tried = replace(candidate, mask="keep", raised=None)
    tried.call(tried.probes[0].inputs, mask=tried.probes[0].mask("bhls", causal=False))
    if tried.raised and tried.raised.is_of_code:
        return Undeclarable(f"each call with a mask raises {tried.raised}")
    raised = f" (a boolean one of (B, H, L, S) raises {tried.raised})" if tried.raised else ""
    return Unclear(
        f"no convention explains what a mask of any common shape does as {name!r}{raised}; pass"
        " mask='keep', 'drop' or 'additive', and mask_shape=..., or mask=None to judge it without"
        " masks"
    )


def with_required_mask(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that give what the module computes with a mask of some format in each
    call.

    There are none if it can do without one.
    """
    if candidates[0].signature.mask is None or not all(
        candidate.problem for candidate in candidates
    ):
        return []
    for shape, convention in product(_shapes(candidates[0]), CONVENTIONS):
        masks: dict[str, Any] = {"mask": convention, "mask_shape": shape, "mask_required": True}
        tried = [
            replace(candidate, claims=dict(candidate.claims), **masks) for candidate in candidates
        ]
        if matching := [candidate for candidate in tried if find_formula(candidate)]:
            return matching
    return []


def _formats(candidate: Candidate) -> list[Candidate]:
    """Return the candidate with each format of masks but their convention, the most general first."""
    separate = candidate.signature_with(padding=True)
    paddings: tuple[PaddingConvention, ...] = (
        ("drop", "keep") if separate.padding and separate.mask else ()
    )
    shapes = _shapes(candidate)
    shared_first = sorted(
        shapes, key=lambda shape: "l" not in SHAPES[shape]
    )  # the others leave `mask` unused
    shared_first = [
        shape for shape in shared_first if "l" in SHAPES[shape] or not separate.guesses_mask
    ]
    return [
        replace(candidate, mask_shape=shape, mask_numbers=numbers, padding=padding)
        for padding, numbers in product((*paddings, None), (False, True))
        for shape in (shared_first if padding else shapes)
    ]


def _shapes(candidate: Candidate) -> list[str | None]:
    """Return the shapes that its masks may have; by its name, a mask may be the number of the keys
    that are allowed.
    """
    counts = candidate.signature.mask in LENGTH_NAMES
    return [shape for shape in SHAPES if counts == (shape is not None and "s" not in shape)]


def _takes_pairs(formats: Sequence[Candidate]) -> bool:
    """Return whether a mask of pairs of a query and a key can be given in one of several formats,
    as a boolean.
    """
    for each in formats:
        if "l" in SHAPES[each.mask_shape] and not each.mask_numbers:
            tried, probe = replace(each, mask="keep"), each.probes[0]
            result = tried.call(probe.inputs, mask=tried.mask_of(probe, "ls"))
            if (
                result is not None
                and isinstance(result.output, Tensor)
                and result.output.shape == probe.inputs[0].shape
            ):
                return True
    return False


def _hides_queries(candidate: Candidate) -> bool:
    """Return whether padding masks of its shape hide keys as they should, and the queries of
    padding as well.

    The contract has no such mask. A query and the key at its position are only the same in
    self-attention.
    """
    is_padding = SHAPES[candidate.mask_shape] == "bs" and not candidate.padding
    if not is_padding or candidate.cross_attention or not candidate.explained:
        return False
    return any(
        all(_hides_both(replace(candidate, mask=convention), probe) for probe in candidate.probes)
        for convention in CONVENTIONS[:2]
    )


def _hides_both(tried: Candidate, probe: Probe) -> bool:
    """Return whether a mask of keys hides them, and gives the queries of padding one output, or
    that without a mask.
    """
    mask = tried.mask_of(probe, "bs")
    tried.claims = tried.claims | tried.masks.limits(Claims())
    result = tried.call(probe.inputs, mask=mask)
    expected, unmasked = (tried.formula(probe.inputs, tried.weights, each) for each in (mask, None))
    if (
        result is None
        or not isinstance(result.output, Tensor)
        or result.output.shape != expected.shape
    ):
        return False
    output, kept = result.output, mask[:, 0, 0]
    if not is_close(output[kept], expected[kept]) or is_close(output[~kept], expected[~kept]):
        return False
    padding = [item[hidden] for item, hidden in zip(output, ~kept, strict=True)]
    alike = all(is_close(rows, rows[:1].expand_as(rows)) for rows in padding)
    return bool(output.isfinite().all()) and (alike or is_close(output[~kept], unmasked[~kept]))


def _in_part(
    formats: Sequence[Candidate], exact: Candidate
) -> tuple[Candidate, list[MaskConvention]] | None:
    """Return a format with a padding mask of its own that counts for some items only, where the
    exact one has none.

    Raises Unclear for masks of each item that count for some items only, and for a padding mask
    without any effect: either may be meant.
    """
    if exact.padding or not exact.explained:
        return None
    per_item = "b" in SHAPES[exact.mask_shape]
    more_general = [
        each
        for each in formats
        if each.padding or not (per_item or "b" not in SHAPES[each.mask_shape])
    ]
    near = nearest_format(more_general, partly=True)
    if near is None or (near[0].padding and not near[0].ignored):
        return near
    if near[0].padding:
        name = exact.signature_with(padding=True).padding
        raise Unclear(
            f"its padding mask {name} has no effect; declare padding=None to leave it out, or"
            " padding='drop'"
        )
    raise Unclear(
        f"masks that all items share count as mask_shape={exact.mask_shape!r}, but those of each"
        f" item for some items only; declare which is meant, mask_shape={exact.mask_shape!r} or"
        f" {near[0].mask_shape!r}"
    )


def _misread(
    exact: Candidate, conventions: list[MaskConvention]
) -> tuple[Candidate, list[MaskConvention]] | None:
    """Return the most general format instead of one of four axes, if masks that are to be broadcast
    are read wrong.

    A class that takes no such mask raises.
    """
    if exact.mask_shape not in ("b h l s", "b 1 l s") or exact.mask_numbers or exact.padding:
        return None
    general, probe = replace(exact, mask_shape=None, mask=conventions[0]), exact.probes[0]
    mask = general.mask_of(probe, "ls")
    shared, expanded = (general.call(probe.inputs, mask=each) for each in (mask[:1, :1], mask))
    if shared is None or expanded is None or agree(shared, expanded):
        return None
    return (
        replace(
            exact, mask_shape=None, assumed="assumed: masks of one item count for some items only"
        ),
        conventions,
    )


def _find_ranks(candidate: Candidate) -> None:
    """Claim the numbers of dimensions with which masks have the same effect as with four.

    Beside a padding mask, boolean ones are split and have four: only masks of numbers are handed on
    as they are. Of these, other numbers are those that raise: one with another effect is judged,
    and fails.
    """
    if candidate.mask_shape is not None or (
        candidate.padding and "float" not in candidate.claims.get("masks", ())
    ):
        return
    probe = candidate.probes[0]
    of_heads, mask = candidate.mask_of(probe, "hls")[:1], candidate.mask_of(probe, "ls")[:1, :1]
    if candidate.padding:
        of_heads, mask = additive(of_heads), additive(mask)
    row = mask[:, :, :1]
    forms = {
        4: (mask, mask),
        3: (of_heads[0], of_heads),
        2: (mask[0, 0], mask),
        1: (row[0, 0, 0], row),
    }
    ranks = {rank for rank, masks in forms.items() if rank == 4 or _counts_as(candidate, *masks)}
    candidate.claims |= {} if ranks == set(forms) else {"mask_ranks": ranks}


def _counts_as(candidate: Candidate, mask: Tensor, expanded: Tensor) -> bool:
    """Return whether a mask has the effect of the expanded one or, beside a padding mask, is not
    refused.
    """
    inputs = candidate.probes[0].inputs
    result = candidate.call(inputs, mask=mask)
    return (
        result is not None
        if candidate.padding
        else agree(result, candidate.call(inputs, mask=expanded))
    )


def _find_integers(candidate: Candidate) -> None:
    """Claim masks of integers, if 1 and 0 count as True and False in them."""
    if (
        candidate.assumed
        or candidate.padding
        or candidate.mask_numbers
        or candidate.mask == "additive"
    ):
        return
    masks = {*candidate.claims.get("masks", {"bool"}), "int"}
    tried, probe = (
        replace(candidate, claims=candidate.claims | {"masks": masks}),
        candidate.probes[0],
    )
    mask = candidate.mask_of(probe, SHAPES[candidate.mask_shape])
    expected = candidate.call(probe.inputs, mask=mask)
    if all(agree(tried.call(probe.inputs, mask=mask.to(dtype)), expected) for dtype in INTEGERS):
        candidate.claims["masks"] = masks


def _fitting_conventions(candidate: Candidate) -> list[MaskConvention]:
    """Return the conventions under which masks of its shape have their effect on both probes."""
    fitting = []
    for convention in CONVENTIONS[:2] if candidate.mask_numbers else CONVENTIONS:
        tried = replace(candidate, mask=convention)
        tried.claims = candidate.claims | tried.masks.limits(Claims())
        if all(fits(tried, probe) for probe in candidate.probes):
            fitting.append(convention)
    return fitting


def fits(tried: Candidate, probe: Probe) -> bool:
    """Return whether masks that differ along the axes of its shape have their effect on a probe."""
    axes = SHAPES[tried.mask_shape]
    masks = [tried.mask_of(probe, axes)]
    if tried.mask_shape is None or tried.padding:
        masks.append(tried.mask_of(probe, "bs")[:, :1, :1])
    if tried.mask_shape is None:
        masks.append(tried.mask_of(probe, "ls")[:1, :1])
    takes_numbers = tried.mask == "additive" and not (tried.padding and "b" not in axes)
    if takes_numbers and tried.explained:
        tried = replace(tried, claims=tried.claims | {"masks": {"bool", "float"}})
        masks.append(additive(masks[0]))
    effect = _gives_formula if tried.explained else _hides_keys
    return all(effect(tried, probe, mask) for mask in masks)


def _gives_formula(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    result = tried.call(probe.inputs, mask=mask)
    return result is not None and is_close(
        result.output, tried.formula(probe.inputs, tried.weights, mask)
    )


def _hides_keys(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    """Return whether each query reads the allowed keys and no others, for a module whose formula is
    unknown.

    Each value is changed in turn. In self-attention that changes the query at this position as
    well, so its own output shows nothing.
    """
    query, key, value = probe.inputs
    base, allowed = (
        tried.call(probe.inputs, mask=mask),
        mask.expand(len(query), -1, query.shape[1], -1),
    )
    if base is None or not isinstance(base.output, Tensor) or base.output.shape != query.shape:
        return False
    for position in range(key.shape[1]):
        shifted = value.clone()
        shifted[:, position] += 1.0
        others = {True: (query, key), "memory": (query, shifted), False: (shifted, shifted)}[
            tried.cross_attention
        ]
        changed = tried.call((*others, shifted), mask=mask)
        if changed is None:
            return False
        reads = ((changed.output - base.output).abs() > 1e-9).any(-1)
        expected = allowed[..., position].any(1)
        own = (torch.arange(query.shape[1]) == position) & (not tried.cross_attention)
        if bool((reads != expected)[:, ~own].any()):
            return False
    return True
