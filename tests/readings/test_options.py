"""Options of a declaration, in groups and one by one; and configs that cannot be guessed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.faults import registry as faults
from mha.implementations import (
    ImplementationError,
    InputFormat,
    MaskFormat,
    from_kernel,
    from_module,
)
from mha.implementations.adapters.configs import AnyConfig, config_code, config_object
from mha.spec import Claims

MASKS: Any = {"mask": "drop", "mask_shape": "b s", "mask_numbers": True}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1) @ v


def test_a_group_says_the_same_as_its_options() -> None:
    masks = MaskFormat("drop", "b s", numbers=True)
    options: dict[str, Any] = {"parameters": faults.PARAMETERS, "name": "mine"}
    flat = from_module(faults.Correct, **MASKS, layout="l b d", **options)
    grouped = from_module(
        faults.Correct, masks=masks, inputs=InputFormat(layout="l b d"), **options
    )
    assert (flat.call, flat.claims, flat.layout) == (grouped.call, grouped.claims, grouped.layout)
    claims = Claims(causal=None, per_head_mask=False, per_query_mask=False, returns_weights=False)
    declared = from_kernel(attend, masks=masks, claims=claims)
    assert declared.call == from_kernel(attend, claims=claims, **MASKS).call


def test_a_group_and_one_of_its_options_are_refused() -> None:
    options: Any = {"masks": MaskFormat("drop"), "mask_shape": "b s"}
    with pytest.raises(ImplementationError, match=r"^mine: masks=\.\.\. and mask_shape are given"):
        from_module(faults.Correct, parameters=faults.PARAMETERS, name="mine", **options)


@pytest.mark.parametrize("adapt", [partial(from_module, parameters={}), from_kernel])
def test_an_unknown_option_is_refused(adapt: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask_form'"):
        adapt(attend, mask_form="b s")


class GPTConfig:
    """One of two classes whose names have the same beginning in common with that of the model."""


class GPTTrainingConfig:
    pass


class GPT:
    def __init__(self, config: Any) -> None:
        self.width = config.hidden_size


def test_of_config_classes_that_fit_equally_none_is_taken() -> None:
    assert isinstance(config_object(GPT, "config", {"hidden_size": 8}, ()), AnyConfig)


def test_without_a_source_only_what_is_missing_is_known() -> None:
    error = AttributeError("missing", name="width", obj=AnyConfig())
    assert config_code(SimpleNamespace, {}, error) == "types.SimpleNamespace(width=..., ...)"
    code = "types.SimpleNamespace(hidden_size=d_model, width=...)"
    error = AttributeError("missing", name="width", obj=AnyConfig(hidden_size=8))
    assert config_code(GPT, {"hidden_size": "d_model"}, error) == code
