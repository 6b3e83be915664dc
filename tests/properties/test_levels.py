"""What decides and what is advised: right classes of disputed conventions conform."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.engine.replay import replay_case
from mha.conformance.reports.sentence import sentence
from mha.conformance.results import Verdict, status_of
from mha.implementations import ImplementationError, from_module
from mha.implementations.discovery.resolve import as_resolved
from mha.spec import Claims
from support.judging import expect_pass


class Plain(nn.Module):
    """Attention as tutorials write it, without a check of any input."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(d_model, d_model, bias=bias) for _ in range(4)
        )

    def split(self, x: Tensor) -> Tensor:
        """Return the heads (B, H, N, d_k)."""
        return x.unflatten(-1, (self.n_heads, self.d_model // self.n_heads)).transpose(1, 2)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights (B, H, L, S)."""
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output (B, L, D)."""
        q, k, v = self.split(self.q(query)), self.split(self.k(key)), self.split(self.v(value))
        weights = self.weigh(q @ k.mT / math.sqrt(q.shape[-1]), mask)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OtherHeads(Plain):
    """As many heads of width d_model // n_heads as fit."""

    def split(self, x: Tensor) -> Tensor:
        """Return the heads."""
        return x.unflatten(-1, (-1, self.d_model // self.n_heads)).transpose(1, 2)


class WiderHeads(Plain):
    """The width of a head is rounded up, and the projections are as wide as all heads."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        width = -(-d_model // n_heads)
        super().__init__(n_heads * width, n_heads, bias)
        self.q, self.k, self.v = (nn.Linear(d_model, n_heads * width, bias=bias) for _ in range(3))
        self.out = nn.Linear(n_heads * width, d_model, bias=bias)


class NarrowerOutput(Plain):
    """The width of a head is rounded down, and W_o is as wide as all heads, so that none fits."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        width = d_model // n_heads
        super().__init__(n_heads * width, n_heads, bias)
        self.q, self.k, self.v = (nn.Linear(d_model, n_heads * width, bias=bias) for _ in range(3))


class GivenWidth(nn.Module):
    """The width of a head is an argument of the constructor, as in vit-pytorch and Keras."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, heads * dim_head) for _ in range(3))
        self.out = nn.Linear(heads * dim_head, dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output."""
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.q(query), self.k(key), self.v(value))
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class NeedsContiguous(Plain):
    """Inputs are viewed, so that those that are not contiguous raise."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output."""
        query, key, value = (x.view(-1).view(x.shape) for x in (query, key, value))
        return super().forward(query, key, value, mask)


class ReadsAsContiguous(Plain):
    """The memory of inputs is read in order, whatever their strides are."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output."""
        if query.stride() != query.contiguous().stride() and 0 not in query.stride():
            query = query.as_strided(query.shape, query.contiguous().stride())
        return super().forward(query, key, value, mask)


class KeepsWeights(Plain):
    """The weights of the last call stay on the module, with their history."""

    attn: Tensor | None = None

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights."""
        self.attn = super().weigh(scores, mask)
        return self.attn


class HalfPrecisionMaskAsBoolean(Plain):
    """A float mask is added, but one of another precision is read as booleans."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights."""
        if mask is None or mask.dtype == torch.bool:
            return super().weigh(scores, mask)
        return (
            scores + mask
            if mask.dtype == scores.dtype
            else scores.masked_fill(mask == 0, -math.inf)
        ).softmax(-1)


class NarrowHeadsRefused(Plain):
    """Heads of an odd width are refused at construction."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        if d_model > 0 and n_heads > 0 and d_model // n_heads == 1 and n_heads > 3:
            raise ValueError(
                f"heads of width 1 are not supported (d_model={d_model}, n_heads={n_heads})"
            )
        super().__init__(d_model, n_heads, bias)


class LessAccurate(Plain):
    """Outputs are off by a few roundings of float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output."""
        return super().forward(query, key, value, mask) * (1 + 7.4e-6)


class AddsMasks(Plain):
    """Masks are added to the scores: a row of -infinity is NaN, and of the lowest number not."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights."""
        return (scores if mask is None else scores + mask).softmax(-1)


class AddsMasksInTiles(Plain):
    """Keys in tiles, with a running maximum: a first tile of -infinity makes the row NaN."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output."""
        q, k, v = self.split(self.q(query)), self.split(self.k(key)), self.split(self.v(value))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores + mask
        largest = scores[..., :1] * 0 - math.inf
        total, context = largest.exp(), torch.zeros_like(q)
        for tile, values in zip(scores.split(16, -1), v.split(16, -2), strict=True):
            larger = torch.maximum(largest, tile.amax(-1, keepdim=True))
            rescaled, numerators = (largest - larger).exp(), (tile - larger).exp()
            total = total * rescaled + numerators.sum(-1, keepdim=True)
            context, largest = context * rescaled + numerators @ values, larger
        return self.out((context / total).transpose(1, 2).flatten(2))


class LargeScale(Plain):
    """Scores are not scaled."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights."""
        return super().weigh(scores * 1.5, mask)


def verdicts_on(cls: type[nn.Module], clauses: Sequence[str]) -> dict[str, Verdict]:
    """Judge a class in float32; return the verdict on each clause."""
    report = check(cls, "quick", clauses=clauses, dtypes="float32")
    return {verdict.clause: verdict for verdict in report.verdicts}


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("cls", "clause", "message"),
    [
        (Plain, "CFG-2", "is not divisible by n_heads"),
        (Plain, "SHP-8", "key and value have a batch size of 1|the batch of the query is larger"),
        (Plain, "MSK-9", "nan"),
        (NeedsContiguous, "SHP-7", "view"),
        (KeepsWeights, "STA-8", "deepcopy"),
        (NarrowHeadsRefused, "CFG-4", "heads of width 1 are not supported"),
    ],
)
def test_what_is_disputed_is_advice(cls: type[nn.Module], clause: str, message: str) -> None:
    verdict = verdicts_on(cls, [clause])[clause]
    assert status_of(verdict) == "unmet SHOULD", verdict
    assert any(part in verdict.message for part in message.split("|")), verdict.message


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("cls", "clause", "message"),
    [
        (
            OtherHeads,
            "CFG-1",
            "(2), but a call returns a result: that of 3 heads of width 1",
        ),
        (
            WiderHeads,
            "CFG-1",
            "but a call returns a result: 2 heads of width 2, so a context of 4 numbers, not 3",
        ),
        (
            NarrowerOutput,
            "CFG-1",
            "but a call returns a result: output_1.shape is (1, 1, 2), but should be (1, 1, 3)",
        ),
        (ReadsAsContiguous, "SHP-7", "which are"),
        (HalfPrecisionMaskAsBoolean, "MSK-14", "mask is added to the scores, or the call raises"),
    ],
)
def test_wrong_results_decide(cls: type[nn.Module], clause: str, message: str) -> None:
    verdict = verdicts_on(cls, [clause])[clause]
    assert (verdict.status, verdict.required) == ("fail", True), verdict
    assert message in verdict.message


def test_class_without_any_check_conforms() -> None:
    clauses = [
        "CFG-1",
        "CFG-2",
        "CFG-3",
        "SHP-6",
        "SHP-8",
        "MSK-1",
        "MSK-2",
        "MSK-9",
        "MSK-12",
        "MSK-14",
        "STA-4",
    ]
    report = check(Plain, "quick", clauses=clauses, dtypes="float32")
    assert report.exit_status == 0
    said = sentence(report.verdicts)
    assert said.startswith("CONFORMS: all ")
    assert "A row without any allowed key makes the gradients of other rows NaN (MSK-9)." in said


def test_inputs_of_a_refused_layout_are_left_out_elsewhere() -> None:
    expect_pass(NeedsContiguous, "SHP-1", "HED-1", "MSK-2", "EQV-8", "STA-3")
    implementation = as_resolved(NeedsContiguous).implementation
    replayed = replay_case(implementation, "HED-1", Case(L=2, S=2, B=2, layout="transposed"))
    assert (replayed.outcome, "which SHP-7 allows" in replayed.message) == ("INAPPLICABLE", True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LargeScale is read as what it is nearest to")
def test_failure_by_a_few_roundings_is_one_of_accuracy() -> None:
    clauses = ["NUM-1", "SMX-5", "EQV-5", "EQV-6"]
    verdicts = verdicts_on(LessAccurate, clauses)
    assert verdicts["NUM-1"].status == "fail"
    assert {verdicts[clause].status for clause in clauses[1:]} == {"blocked"}
    assert {verdicts[clause].blocked_by for clause in clauses[1:]} == {"NUM-1"}
    scaled = verdicts_on(LargeScale, ["NUM-1", "SMX-6"])
    assert {verdict.status for verdict in scaled.values()} == {"fail"}


def test_strict_run_raises_advice() -> None:
    assert check(Plain, "quick", clauses="SHP-8", dtypes="float32").exit_status == 0
    assert check(Plain, "quick", clauses="SHP-8", dtypes="float32", strict=True).exit_status == 1


@pytest.mark.slow
def test_masks_that_are_added_are_given_the_lowest_number_where_infinity_gives_nan() -> None:
    resolved = as_resolved(AddsMasks)
    assert resolved.inference is not None
    assert 'masked_number="lowest"' in resolved.inference.declaration
    assert "where the lowest number of the dtype hides a key" in " ".join(
        resolved.inference.report().split()
    )
    report = check(
        resolved,
        "quick",
        clauses=["MSK-1", "MSK-2", "MSK-8", "MSK-9", "MSK-11", "CAU-1"],
        dtypes="float32",
    )
    assert report.exit_status == 0
    assert {verdict.clause for verdict in report.verdicts if verdict.status == "fail"} <= {
        "MSK-8",
        "MSK-11",
        "CAU-1",
    }


@pytest.mark.slow
def test_infinity_that_spoils_rows_with_a_key_is_not_avoided() -> None:
    resolved = as_resolved(AddsMasksInTiles)
    assert resolved.inference is not None
    assert "masked_number" not in resolved.inference.declaration
    (verdict,) = check(resolved, "quick", clauses="NUM-1", dtypes="float32").verdicts
    assert verdict.status == "fail"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask": "additive", "masked_number": "-1e9"},
            "masked_number must be '-inf' or 'lowest', but is '-1e9'",
        ),
        ({"mask": "drop", "masked_number": "lowest"}, "pass mask='additive'"),
    ],
)
def test_number_that_hides_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    parameters = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}
    with pytest.raises(ImplementationError, match=re.escape(message)):
        from_module(AddsMasks, parameters=parameters, **options)


def test_class_that_is_given_the_width_of_a_head_has_it() -> None:
    verdict = verdicts_on(GivenWidth, ["CFG-1"])["CFG-1"]
    assert (verdict.status, verdict.message) == (
        "not_claimed",
        "does not apply: own_head_dim is claimed",
    )
    claims = Claims(masks=(), causal=None, returns_weights=False)  # without a width of their own
    parameters = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}
    declared = from_module(GivenWidth, parameters=parameters, mask=None, claims=claims)
    (verdict,) = check(declared, "quick", clauses="CFG-1", dtypes="float32").verdicts
    assert verdict.status == "not_claimed"
    assert "takes the width of a head" in verdict.message
