"""Rotary positions that count the tokens which a padding mask allows, and no others."""

from __future__ import annotations

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.mask_effects import with_convention
from mha.implementations.inference.probes import CONVENTIONS, SHAPES, Probe, is_close


def moves_positions(masked: Candidate) -> bool:
    """Return whether padding masks of a format hide keys, and move the positions of later tokens.

    As where `mask.cumsum(-1) - 1` are the positions, for batches that are padded on the left. The
    contract has no such mask: each entry acts on its own key only (clause MSK-6).
    """
    declared = masked.declared
    is_padding = SHAPES[declared.mask_shape] == "bs" and not declared.padding
    if not is_padding or masked.cross_attention or not masked.claimed("rotary"):
        return False
    for convention in CONVENTIONS[:2]:
        if with_convention(masked, convention).passes(_leaves_out_tokens):
            return True
    return False


def _leaves_out_tokens(tried: Candidate, probe: Probe) -> bool:
    """Return whether the allowed tokens of each item get what they get without the others."""
    mask = tried.mask_of(probe, "bs")
    result = tried.call(probe.inputs, mask=mask)
    if result is None:
        return False
    for item, output, allowed in zip(probe.inputs[0], result.output, mask[:, 0, 0], strict=True):
        rest = item[allowed].unsqueeze(0)
        expected = tried.formula((rest, rest, rest), tried.weights, None)
        if not is_close(output[allowed].unsqueeze(0), expected):
            return False
    return True
