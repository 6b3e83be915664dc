"""Modules of query, key and value that are made for the width of a head."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.adapters.of_width import OfWidth
from mha.implementations.discovery.inferred import inference_of
from mha.implementations.inference.kernel_forms import kernel_of_width
from support.judging import verdict_of


class ByWidth(nn.Module):
    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, attn_mask: Tensor) -> Any:
        scores = Q @ K.mT / math.sqrt(self.d_k)
        weights = scores.masked_fill(attn_mask, -1e9).softmax(-1)
        return weights @ V, weights


class ByTemperature(nn.Module):
    def __init__(self, temperature: float, attn_dropout: float = 0.1) -> None:
        super().__init__()
        self.temperature, self.dropout = temperature, nn.Dropout(attn_dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        scores = (q / self.temperature) @ k.mT
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return weights @ v, weights


class ByScale(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * self.scale).softmax(-1) @ v


class ByName(ByScale):
    def forward(self, *, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        del others
        return super().forward(q, k, v)


class ValuesFirst(ByScale):
    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        return super().forward(query, key, value)


class WithWeights(ByScale):
    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.out = nn.Linear(4, 4)


class OfValues(nn.Module):
    def __init__(self, d_v: int) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


CODE = {
    ByWidth: "lambda Q, K, V, attn_mask: ByWidth(d_k=Q.shape[-1]).eval()(Q, K, V, attn_mask)",
    ByTemperature: (
        "lambda q, k, v, mask=None: ByTemperature(temperature=q.shape[-1] ** 0.5,"
        " attn_dropout=0.0).eval()(q, k, v, mask)"
    ),
    ByScale: "lambda q, k, v: ByScale(scale=q.shape[-1] ** -0.5).eval()(q, k, v)",
    ValuesFirst: (
        "lambda value, key, query: ValuesFirst(scale=query.shape[-1] ** -0.5).eval()"
        "(value, key, query)"
    ),
    ByName: (
        "lambda *, q, k, v, **others: ByName(scale=q.shape[-1] ** -0.5).eval()"
        "(q=q, k=k, v=v, **others)"
    ),
}


@pytest.mark.parametrize("cls", CODE, ids=lambda cls: cls.__name__)
def test_module_is_made_for_the_width_of_each_call(cls: type[nn.Module]) -> None:
    found = inference_of(f"mine.py:{cls.__name__}", cls)

    assert found.kind == "class"
    assert CODE[cls] in found.declaration
    formula = [row.finding for row in found.rows if row.topic == "formula"]
    assert formula == ["softmax(q k^T / sqrt(d_k)) v"]


@pytest.mark.parametrize("cls", [WithWeights, OfValues])
def test_other_modules_are_not_made_so(cls: type[nn.Module]) -> None:
    assert kernel_of_width(cls) is None


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
def test_script_makes_the_module_for_the_width_of_its_call(tmp_path: Path) -> None:
    file = tmp_path / "by_width.py"
    imports = "import math\nfrom typing import Any\nfrom torch import Tensor, nn\n\n"
    file.write_text(imports + inspect.getsource(ByWidth))

    verdict = verdict_of(f"{file}:ByWidth", "MSK-10")

    assert (
        "kernel = lambda Q, K, V, attn_mask: ByWidth(d_k=Q.shape[-1]).eval()(Q, K, V, attn_mask)"
        in (verdict.script or "")
    )


def test_each_width_has_a_module_of_its_own() -> None:
    kernel = OfWidth(ByScale, {"scale": "{} ** -0.5"})
    for width in (2, 5):
        q = torch.randn(1, 1, 3, width)
        torch.testing.assert_close(kernel(q, q, q), ByScale(width**-0.5)(q, q, q))


def test_width_is_that_of_the_query_wherever_that_comes() -> None:
    kernel = OfWidth(ValuesFirst, {"scale": "{} ** -0.5"})
    q, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 9)
    torch.testing.assert_close(kernel(v, q, query=q), ByScale(0.5)(q, q, v))
