"""What a module's mask means, and of what shape it is: found by what masks do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Reading, word_of
from mha.implementations.inference.probes import Probe, near, probes, with_numbers
from mha.implementations.inference.projections import Unclear

# Shapes of mask that are tried, with the axes along which such a mask may differ: the most general first.
SHAPES: dict[str | None, str] = {
    None: "bhls",
    "b h l s": "bhls",
    "(b h) l s": "bhls",
    "b 1 l s": "bls",
    "b l s": "bls",
    "l s b": "bls",
    "b 1 1 s": "bs",
    "b 1 s": "bs",
    "b s": "bs",
    "s b": "bs",
    "l s": "ls",
}


def try_masks(reading: Reading) -> None:
    """Find convention and shape; raises Unclear where none explains what masks do."""
    word = word_of("mask", reading.taken)
    if word is None:
        reading.claims["masks"] = ()
        return
    for numbers, (shape, axes) in product((False, True), SHAPES.items()):
        fitting = set()
        for convention in ("keep", "drop") if numbers else ("keep", "drop", "additive"):
            tried = replace(reading, mask=convention, mask_shape=shape, mask_numbers=numbers)
            if all(_fits(tried, probe, axes) for probe in probes(alone=reading.alone)):
                fitting.add(convention)
        if fitting:
            reading.mask = next(each for each in ("keep", "drop", "additive") if each in fitting)
            reading.mask_shape, reading.mask_numbers = shape, numbers
            forms = {"bool", "float"} if "additive" in fitting else {"bool"}
            reading.claims |= {"masks": forms} if forms != {"bool"} else {}
            kinds = {"b": "per_item_mask", "h": "per_head_mask", "l": "per_query_mask"}
            reading.claims |= {claim: False for axis, claim in kinds.items() if axis not in axes}
            return
    why = "" if reading.explained else "; nothing explains its outputs without a mask either"
    raise Unclear(
        f"no convention of {word!r} explains what it does with a mask of the usual shapes{why}; give mask='keep', "
        "'drop' or 'additive', and mask_shape=..., or mask=None to judge it without masks"
    )


def _fits(tried: Reading, probe: Probe, axes: str) -> bool:
    """Whether masks of a convention and a shape do on a probe what they should."""
    causal = tried.formula.causal
    masks = [probe.mask(axes, causal=causal)]
    if tried.mask_shape is None:
        masks += [probe.mask("bs", causal=causal)[:, :1, :1], probe.mask("ls", causal=causal)[:1, :1]]
    if tried.mask == "additive" and tried.explained:
        masks.append(with_numbers(masks[0]))
    return all(_explains(tried, probe, mask) if tried.explained else _hides(tried, probe, mask) for mask in masks)


def _explains(tried: Reading, probe: Probe, mask: Tensor) -> bool:
    seen = tried.call(probe.inputs, mask=mask)
    return seen is not None and near(seen.output, tried.formula(probe.inputs, tried.weights, mask))


def _hides(tried: Reading, probe: Probe, mask: Tensor) -> bool:
    """Whether a query does not read what is hidden from it, and reads the rest, where no formula tells its output.

    Each key is changed in turn, and so each query's own input in self-attention, which it always reads.
    """
    query, key, value = probe.inputs
    base, heads = tried.call(probe.inputs, mask=mask), mask.expand(len(query), -1, query.shape[1], -1)
    if base is None or not isinstance(base.output, Tensor) or base.output.shape != query.shape:
        return False
    for place in range(key.shape[1]):
        moved = value.clone()
        moved[:, place] += 1.0
        changed = tried.call((moved,) * 3 if tried.alone else (query, key, moved), mask=mask)
        if changed is None:
            return False
        reads = ((changed.output - base.output).abs() > 1e-9).any(-1)
        may = heads[..., place].any(1)
        own = torch.arange(query.shape[1]) == place if tried.alone else torch.zeros(query.shape[1], dtype=torch.bool)
        if bool((reads != may)[:, ~own].any()):
            return False
    return True
