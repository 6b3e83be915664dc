"""Which dropout is claimed: what trial runs show, also of a wrong scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from support import plain
from support.judging import expect_fail, judged
from support.options import DropsWeights, Plain
from support.readings import expect_read, findings
from support.right_classes import Fused, OfItself, Separate

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class DropsOutput(Plain):
    def finish(self, output: Tensor) -> Tensor:
        return self.drop(output)  # type: ignore[no-any-return]  # of nn.Module


class DropsBoth(DropsWeights, DropsOutput):
    pass


class ForgetsToRescale(Plain):
    def weigh(self, weights: Tensor) -> Tensor:
        return weights * (torch.rand_like(weights) >= self.drop.p) if self.training else weights


class DividesInsteadOfMultiplying(Plain):
    def finish(self, output: Tensor) -> Tensor:
        return self.drop(output) * (1 - self.drop.p) ** 2 if self.training else output


WRONG_SCALES: dict[type[nn.Module], bool | str] = {
    ForgetsToRescale: True,
    DividesInsteadOfMultiplying: "output",
}
DROPOUTS = {
    Plain: False,
    DropsWeights: True,
    DropsOutput: "output",
    DropsBoth: "both",
    **WRONG_SCALES,
}


@pytest.mark.parametrize("cls", DROPOUTS, ids=lambda cls: cls.__name__)
def test_dropout_is_claimed_as_trial_runs_show_it(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert result.implementation.claims.dropout == DROPOUTS[cls]
    assert ("dropout" in findings(result)) == bool(DROPOUTS[cls])
    assert ("dropout" in findings(result).get("not judged", "")) == (not DROPOUTS[cls])


@pytest.mark.parametrize("cls", WRONG_SCALES, ids=lambda cls: cls.__name__)
def test_dropout_of_a_wrong_scale_fails(cls: type[nn.Module]) -> None:
    assert judged(cls, "DRP").failing == "DRP-2"


class DropsLessThanAll(OfItself):
    """It refuses to drop everything."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        # In one line, as it is often written: DRP-3 looks at the line that raises.
        # fmt: off
        if not 0.0 <= dropout < 1.0: raise ValueError(f"dropout must not be {dropout}")  # noqa: E701  one line
        # fmt: on
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(super().forward(x))
        return output


class KeepProbability(Fused):
    """Its attribute with dropout in the name is no probability of dropping."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.dropout_keep_prob = 1.0 - dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 1.0 - self.dropout_keep_prob, self.training)


class FixedDropout(Separate):
    """Its dropout layer is not set by the constructor."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.attend(x, x, x)[0])  # type: ignore[no-any-return]  # of nn.Module


@pytest.mark.parametrize(
    ("cls", "row", "judged"),
    [
        (DropsLessThanAll, "drops the output in training", "DRP-3"),
        (KeepProbability, "drops the output in training", "DRP-3"),
        (FixedDropout, "layers of a fixed probability, which is set to 0  [tested]", "HED-1"),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str, judged: str) -> None:
    expect_read(cls, row, judged)


class OfAFixedProbability(Fused):
    """The probability stands in the code, under the name of the function."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout, self.training)


class OfAFixedProbabilityByHand(Fused):
    """It does not call a function for dropout."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * (torch.rand_like(output) >= 0.1) / 0.9 if self.training else output


def test_dropout_of_a_fixed_probability_is_left_out() -> None:
    row = "not judged: in training it drops with a fixed probability, which is left out"
    result = expect_read(OfAFixedProbability, row, "HED-1", "STA-2")
    assert 'neutral={"dropout": torch.nn.Identity}' in result.declaration


class DropsInEvaluation(Fused):
    """Wrong: it drops in evaluation as well."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            OfAFixedProbabilityByHand,
            "in training its outputs are random, .* let the constructor take that as dropout",
        ),
        (DropsInEvaluation, "two equal calls in evaluation return different outputs"),
    ],
)
def test_dropout_that_cannot_be_set_is_refused(cls: type[nn.Module], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        infer(cls)


class ScaledByNothing(DropsLessThanAll):
    """Wrong: it divides by the share that is kept, also where that is 0."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.scale, self.p = 1 / (1 - dropout), dropout

    def forward(self, x: Tensor) -> Tensor:
        output = self.of(x, x, x)
        if not self.training:
            return output
        return output * (torch.rand_like(output) >= self.p) * self.scale


class KeepsALogarithm(OfItself):
    """Wrong: that of 0 raises ValueError, as a check of the range does."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = nn.Dropout(dropout)
        self.log = math.log(1 - dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(super().forward(x))
        return output


@pytest.mark.parametrize(
    ("cls", "error"), [(ScaledByNothing, "ZeroDivisionError"), (KeepsALogarithm, "ValueError")]
)
def test_construction_that_breaks_with_p_of_1_fails(cls: type[nn.Module], error: str) -> None:
    expect_fail(cls, "DRP-3", error)


class TakesDropout(plain.Plain):
    """The name of its dropout is uncommon."""

    def __init__(self, d_model: int, n_heads: int, p_drop: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.drop = nn.Dropout(p_drop)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights: Tensor = self.drop(super().weigh(scores, mask))
        return weights


class DropsScores(plain.Plain):
    """Drops scores, and not weights."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.drop = nn.Dropout(dropout)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(self.drop(scores), mask)


def test_dropout_of_another_name_is_tested() -> None:
    assert "dropout      drops the weights in training  [tested]" in infer(TakesDropout).report(400)


def test_other_dropout_is_not_judged_and_named() -> None:
    result = infer(DropsScores)
    assert not result.implementation.claims.dropout
    named = "not judged: in training it drops something other"
    assert findings(result)["dropout"].startswith(named)
