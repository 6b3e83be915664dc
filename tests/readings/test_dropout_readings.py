"""Which dropout is claimed: what trial runs show, also of a wrong scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.inference.infer import infer
from support.options import DropsWeights, Plain, findings


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
    assert check(cls, "quick", clauses="DRP", dtypes="float32").failing == "DRP-2"
