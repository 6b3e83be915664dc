"""Faults that ROT and QKN must catch: rotations and norms of queries and keys."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CALLED, Complete
from mha.conformance.faults.fault import fault
from mha.implementations.formula import normed, on_the_way, rotated
from mha.spec import QkNorm, Rotary, Scores

RIGHT = "rotated_heads_give_the_oracles_result"
NORMED = "normed_heads_give_the_oracles_result"
# Half of each head is rotated, by a base that is not the usual one.
ROTATED = replace(CALLED, scores=Scores(), rotary=Rotary(base=500000.0, part=0.5))
# Of widths up to 8, one pair, whose frequency is 1.
QUARTER = replace(ROTATED, rotary=Rotary(part=0.25))
WITH_CACHE = replace(ROTATED, decodes=True)
NORMED_HEADS = replace(CALLED, scores=Scores(), rotary=Rotary(), qk_norm=QkNorm(eps=1e-2))
NORMED_WIDTH = replace(NORMED_HEADS, qk_norm=QkNorm(over="width"))


@fault("ROT-1", claims=ROTATED, caught_by=RIGHT)
@fault("ROT-1", claims=ROTATED, caught_by="a_rotation_has_an_effect")
@fault("ROT-1", claims=ROTATED, caught_by="gradients_are_rotated_back")
class NothingIsRotated(Complete):
    """Queries and keys are not rotated."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        return heads


@fault(
    "ROT-1",
    claims=ROTATED,
    caught_by=RIGHT,
    source="https://github.com/huggingface/transformers/issues/25199",
)
class InterleavedForHalves(Complete):
    """Neighbouring columns are rotated, although the weights are for halves."""

    does = replace(ROTATED, rotary=replace(ROTATED.rotary, pairs="interleaved"))  # type: ignore[type-var]  # it is claimed


@fault("ROT-1", claims=ROTATED, caught_by=RIGHT)
@fault("ROT-1", claims=ROTATED, caught_by="only_differences_of_positions_count")
@fault(
    "ROT-1",
    claims=ROTATED,
    dtype="bfloat16",
    caught_by="errors_of_rotated_heads_do_not_add_up_to_a_defect",
    script_shows=False,
)
class KeysStay(Complete):
    """The keys are not rotated, so that scores depend on the query's position."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        return heads if role == "k" else super().on_the_way(heads, role)


@fault("ROT-1", claims=ROTATED, caught_by=RIGHT)
class BaseOfAnotherModel(Complete):
    """The base is 10000, although that of the model is 500000."""

    does = replace(ROTATED, rotary=Rotary(part=0.5))


@fault("ROT-1", claims=ROTATED, caught_by=RIGHT)
class AllColumnsAreRotated(Complete):
    """All columns of a head are rotated, although a half of them is to be."""

    does = replace(ROTATED, rotary=Rotary(base=500000.0))


@fault("ROT-1", claims=ROTATED, caught_by=RIGHT)
class TurnedTheOtherWay(Complete):
    """The sines have the opposite sign."""

    does = replace(ROTATED, rotary=Rotary(500000.0, part=0.5, direction="backward"))


@fault(
    "ROT-1",
    claims=ROTATED,
    caught_by="positions_of_long_sequences_are_exact",
    trigger="positions above 256",
    source="https://github.com/huggingface/transformers/pull/29285",
)
class PositionsInBfloat16(Complete):
    """Positions are counted in bfloat16, in which 257 is 256."""

    def positions(self, x: Tensor) -> Tensor:
        return super().positions(x).bfloat16()


@fault("ROT-1", claims=WITH_CACHE, caught_by="a_cache_continues_the_positions", script_shows=False)
class PositionsRestart(Complete):
    """Each decoded token is at position 0, whatever the cache has."""

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[2], device=x.device)


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
@fault("QKN-1", claims=NORMED_HEADS, caught_by="a_norm_has_an_effect")
@fault("QKN-1", claims=NORMED_HEADS, caught_by="gradients_have_the_norm")
class NothingIsNormed(Complete):
    """Queries and keys are rotated, but not normed."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        assert self.claims.rotary
        return rotated(heads, self.claims.rotary, self.positions(heads))


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED, trigger="H > 1")
class NormOverAllHeads(Complete):
    """The norm is over all heads at once, with one weight for the columns of each."""

    does = replace(NORMED_HEADS, qk_norm=QkNorm(over="width", eps=1e-2))


@fault("QKN-1", claims=NORMED_WIDTH, caught_by=NORMED, trigger="H > 1")
class NormOfEachHead(Complete):
    """Each head is normed on its own, although the norm is over all of them."""

    does = replace(NORMED_WIDTH, qk_norm=QkNorm(weight=None))

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        assert self.claims.rotary
        scaled = normed(heads, QkNorm(weight=None), None)
        weight = getattr(self, f"{role}_norm", None)
        if weight is not None:
            scaled = scaled * weight.view(-1, 1, heads.shape[-1])
        return rotated(scaled, self.claims.rotary, self.positions(heads))


@fault("QKN-1", claims=NORMED_HEADS, caught_by="rows_of_zeros_are_finite", trigger="rows of zeros")
class NoEpsilon(Complete):
    """A row is divided by its root mean square, without eps: 0 / 0 is NaN."""

    does = replace(NORMED_HEADS, qk_norm=QkNorm(eps=1e-300))


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
class WeightLeftOut(Complete):
    """The weights of the norm are not used."""

    does = replace(NORMED_HEADS, qk_norm=QkNorm(eps=1e-2, weight=None))


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
class WeightPlusOne(Complete):
    """Columns are multiplied by 1 more than the weight, as in Gemma, although by the weight."""

    does = replace(NORMED_HEADS, qk_norm=QkNorm(eps=1e-2, weight="offset"))


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
class NormAfterTheRotation(Complete):
    """Heads are rotated first, and then multiplied by the weights of columns that have moved."""

    does = replace(NORMED_HEADS, qk_norm=QkNorm(eps=1e-2, before_rotary=False))


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
@fault(
    "QKN-1",
    claims=NORMED_HEADS,
    dtype="bfloat16",
    caught_by="errors_of_normed_heads_do_not_add_up_to_a_defect",
    script_shows=False,
)
class NormOfKeysOnly(Complete):
    """The queries are not normed."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        assert self.claims.rotary
        if role == "q":
            return rotated(heads, self.claims.rotary, self.positions(heads))
        return super().on_the_way(heads, role)


@fault("QKN-1", claims=NORMED_HEADS, caught_by=NORMED)
class DividedByTheLength(Complete):
    """Heads are divided by their length, and not by its part of each column, 1 / sqrt(d_k)."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        return super().on_the_way(heads, role) / math.sqrt(heads.shape[-1])


@fault(
    "ROT-1",
    claims=QUARTER,
    dtype="bfloat16",
    caught_by="frequencies_are_not_rounded",
    trigger="positions far from the start",
    script_shows=False,
    source="https://github.com/huggingface/transformers/pull/29285",
)
@fault(
    "ROT-1",
    claims=QUARTER,
    caught_by="positions_of_long_sequences_are_exact",
)
class FrequenciesInBfloat16(Complete):
    """Frequencies are in a buffer, which is rounded where the module is cast to bfloat16."""

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        weight = getattr(self, f"{role}_norm", None)
        return on_the_way(heads, self.claims, weight, self.positions(heads), torch.bfloat16)
