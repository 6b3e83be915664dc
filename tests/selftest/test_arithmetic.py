"""Right arithmetic conforms if it is declared, and wrong arithmetic fails, whatever is declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.conformance.faults.base import Direct
from mha.implementations.inference.infer import infer
from mha.spec import Claims, Rounding
from mha.spec.rounding import Products
from support import judging, products
from support.arithmetic import RIGHT, WRONG, Arithmetic
from support.effort import EVERYTHING
from support.products import with_factors

pytestmark = pytest.mark.usefixtures("unshrunk", "undiagnosed")
# All rows with all clauses take an hour, in `make lattice`.
CLAUSES = [] if EVERYTHING else ["HED-1", "NUM-1", "SMX-2", "GRD-1"]


FIRST = {
    "tf32, nearest",
    "bf16x3",
    "two parts of products",
    "flushed",
    "like FlashAttention",
    "online, tiles of 4",
}
FIRST |= {
    "tf32, declared bf16x3",
    "float8, declared bf16",
    "coarse exponential, 2^-4",
    "eight parts, declared one",
}


def rows(table: Mapping[str, Arithmetic]) -> list[Any]:
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(name, dtype, marks=marks[name in FIRST and dtype == row.dtypes[0]])
        for name, row in table.items()
        for dtype in row.dtypes
    ]


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(("name", "dtype"), rows(RIGHT))
def test_right_arithmetic_conforms(name: str, dtype: str) -> None:
    row = RIGHT[name]
    report = check(Direct(row.cls, row.claims), judging.RIGHT, dtypes=dtype, clauses=CLAUSES)
    wrong = [verdict for verdict in report.verdicts if verdict.status not in judging.ALLOWED]
    assert not [verdict for verdict in wrong if verdict.level != "SHOULD"]


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(("name", "dtype"), rows(WRONG))
def test_wrong_arithmetic_fails(name: str, dtype: str) -> None:
    row = WRONG[name]
    clauses = [*CLAUSES, "NUM-7", "NUM-8", "SMX-4", "GRD-8"] if CLAUSES else []
    report = check(Direct(row.cls, row.claims), "quick", dtypes=dtype, clauses=clauses)
    assert [
        verdict
        for verdict in report.verdicts
        if verdict.status == "fail" and verdict.level != "SHOULD"
    ]


class Products32(nn.Module):
    """Self-attention whose products are of rounded numbers, in float32 alone."""

    limbs: products.Limbs

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = products.Product.apply(a, b, type(self).limbs)
        return product

    def project(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return self.multiply(x.flatten(0, 1), layer.weight.T).unflatten(0, x.shape[:2]) + layer.bias

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.project(layer, x).unflatten(-1, (self.n_heads, -1))
            for layer in (self.q, self.k, self.v)
        )
        q, k, v = (head.transpose(1, 2) for head in heads)
        scores = self.multiply(q, k.mT) / q.shape[-1] ** 0.5
        raised = (scores - scores.amax(-1, keepdim=True)).exp()
        context = self.multiply(raised, v) / raised.sum(-1, keepdim=True)
        return self.project(self.o, context.transpose(1, 2).flatten(2))


LIMBS: dict[Products, products.Limbs] = {
    "tf32": products.tf32_cut,
    "bf16": products.bf16,
    "bf16x3": products.two_bf16,
    "ieee": lambda x: (x,),
}


@pytest.mark.parametrize("products", LIMBS)
def test_products_of_an_undeclared_class_are_found(products: Products) -> None:
    cls = type("Multiplies", (Products32,), {"limbs": staticmethod(LIMBS[products])})
    inference = infer(cls)
    assert inference.implementation.claims.rounding == Rounding(products=products)
    assert (f'rounding=Rounding(products="{products}")' in inference.declaration) == (
        products != "ieee"
    )
    assert ("multiplied" in inference.report()) == (products != "ieee")


def test_an_error_that_is_not_of_products_is_not_found_to_be() -> None:
    class Larger(Products32):
        limbs = staticmethod(LIMBS["ieee"])

        def project(self, layer: nn.Linear, x: Tensor) -> Tensor:
            projected = super().project(layer, x)
            return projected * (1 + 2e-4 * (x.dtype == torch.float32))

    assert infer(Larger).implementation.claims.rounding == Rounding()


@pytest.mark.slow
def test_rounding_that_hides_wrong_answers_is_no_fault_of_the_judge() -> None:
    """GRD-1 cannot tell what the gradients dropped within the bound of products in bfloat16."""
    row = Arithmetic(with_factors(products.bf16), ("float32",), Rounding(products="bf16"))
    report = check(
        Direct(row.cls, row.claims), "quick", dtypes="float32", clauses=["GRD-1", "DRP-2"]
    )
    assert not [verdict for verdict in report.verdicts if verdict.status == "harness_error"]
    assert Claims(rounding=Rounding(products="bf16")).rounding.is_coarse
