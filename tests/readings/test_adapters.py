"""Adapters: modules and kernels of many conventions are judged, and misfits are explained."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import Case, check
from mha.conformance.faults import registry as faults
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.implementations import (
    ImplementationError,
    from_kernel,
    from_module,
    preflight,
)
from mha.implementations.adapters.kernel import KernelImplementation
from mha.spec import Claims, Config, Implementation, Weights
from support.judging import expect_conforms, expect_fail, expect_pass, judged

# What an adapter could break: values, masks, the causal flag, biases, rejected arguments, weights.
CLAUSES = ["CFG-1", "CFG-5", "SHP-1", "SHP-2", "MSK-1", "MSK-6", "CAU-3", "NUM-1"]


class Stacked(faults.Correct):
    """Query, key and value have one stacked projection; the constructor uses other names."""

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads, bias)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        del self.q_proj, self.k_proj, self.v_proj
        thirds = [slice(i * embed_dim, (i + 1) * embed_dim) for i in range(3)]
        self.q_proj, self.k_proj, self.v_proj = (partial(self.part, rows) for rows in thirds)

    def part(self, rows: slice, x: Tensor) -> Tensor:
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        return nn.functional.linear(x, self.qkv.weight[rows], bias)


class Dropping(faults.Correct):
    """True = masked; no causal flag; weights only on request."""

    def forward(  # type: ignore[override]  # another signature is the point
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Any:
        output, weights, _ = super().forward(q, k, v, None if attn_mask is None else ~attn_mask)
        return (output, weights) if return_weights else output


class Adding(faults.Correct):
    """Takes additive masks only."""

    bias: Tensor | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return (
            scores
            if self.bias is None
            else scores + self.bias.masked_fill(self.bias == -torch.inf, 0.0)
        )

    def forward(  # type: ignore[override]  # another signature is the point
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Any:
        if mask is not None and mask.dtype != query.dtype:
            raise TypeError(f"the mask must be additive, but is {mask.dtype}")
        self.bias = mask
        return super().forward(
            query, key, value, None if mask is None else mask != -torch.inf, causal
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return context and weights, in the layout (B, H, L, d_k)."""
    base = faults.Correct(4, 2)
    base.config = base.config.__class__(q.shape[-1], 1)
    weights = base.weigh(base.score(q, k), base.allow(mask, causal, q, k))
    return weights @ v, weights


def sequence_first(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in the layout (L, B, H, d_k), with True = masked and no causal flag."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    context, weights = attend(q, k, v, None if attn_mask is None else ~attn_mask)
    return context.permute(2, 0, 1, 3), weights


WITH_WEIGHTS = Claims()


ADAPTED: dict[str, Implementation] = {
    "stacked": from_module(Stacked, parameters={"w_qkv": "qkv", "w_o": "out_proj"}),
    "dropping": from_module(Dropping, parameters=faults.PARAMETERS, mask="drop"),
    "adding": from_module(Adding, parameters=faults.PARAMETERS, mask="additive"),
    "kernel": from_kernel(attend, claims=WITH_WEIGHTS),
    "sequence first": from_kernel(
        sequence_first, layout="l b h d", mask="drop", claims=WITH_WEIGHTS
    ),
}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_implementation_conforms(name: str) -> None:
    adapted = ADAPTED[name]
    of_modules = () if isinstance(adapted, KernelImplementation) else ("CFG-1", "CFG-5")
    expect_pass(adapted, "SHP-1", "MSK-1", "NUM-1", *of_modules, also=CLAUSES)


def test_incorrect_declaration_of_the_mask_fails() -> None:
    inverted = from_module(Dropping, parameters=faults.PARAMETERS, mask="keep")
    report = check(inverted, clauses=["MSK-1", "CAU-1"], dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} == {"fail"}


class OneInput(faults.Correct):
    """Self-attention: one input, and a mask without a default."""

    def forward(self, x: Tensor, attn_mask: Tensor | None, *, causal: bool = False) -> Tensor:
        return super().forward(x, x, x, attn_mask, causal).output


def test_module_with_one_input_is_self_attention() -> None:
    claims = Claims(cross_attention=False, returns_weights=False)
    adapted = from_module(OneInput, parameters=faults.PARAMETERS, claims=claims)
    expect_conforms(adapted, CLAUSES)


def test_module_without_masks_claims_none() -> None:
    class Maskless(faults.Correct):
        """Takes no mask."""

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]  # on purpose
            return super().forward(query, key, value)

    maskless = from_module(Maskless, parameters=faults.PARAMETERS, mask=None)
    statuses = expect_pass(maskless, "NUM-1", also=["MSK-1", "CAU-2"])
    assert statuses["MSK-1"] == statuses["CAU-2"] == "not_claimed"


def test_unclaimed_mask_reaches_the_module_untranslated() -> None:
    adding = from_module(
        Adding, parameters=faults.PARAMETERS, mask="additive", claims=Claims(masks={"float"})
    )
    expect_pass(adding, also=["MSK-11", "MSK-12", "CAU-2"])


class Unrecognised(nn.Module):
    """The parameters of its constructor have no known names."""

    def __init__(self, pieces: int, parts: int, places: int) -> None:
        super().__init__()


class OneHeadDiffers(faults.Correct):
    """With one head, its output projection has another name."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        if n_heads == 1:
            self.proj = self.out_proj
            del self.out_proj


def call_without_masks(
    module: nn.Module, *inputs: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Call a module; this adapter has no way to give it a mask."""
    if mask is not None:
        raise ImplementationError("Correct: its masks cannot be expressed; claim masks=()")
    return module(*inputs, is_causal=options["is_causal"])


@pytest.mark.parametrize(
    ("cls", "call", "clause", "message"),
    [
        (
            OneHeadDiffers,
            None,
            "SHP-1",
            (
                "the adapter, not the class, failed in build.*OneHeadDiffers: the module has no"
                " 'out_proj'; its param"
            ),
        ),
        (
            faults.Correct,
            call_without_masks,
            "MSK-1",
            "the call: .*its masks cannot be expressed; claim masks=",
        ),
    ],
    ids=["build", "call"],
)
def test_error_of_the_adapter_is_not_a_failure_of_the_class(
    cls: Any, call: Any, clause: str, message: str
) -> None:
    adapted = from_module(cls, parameters=faults.PARAMETERS, call=call)
    report = judged(adapted, [clause])
    (verdict,) = report.verdicts
    assert verdict.status == "harness_error"
    assert report.exit_status == 2
    assert re.search(message, verdict.message)
    assert "\n" not in verdict.message


class RefusesNothing(nn.Module):
    """Builds whatever it is asked for, and cuts a mask (B, S) to size."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int) -> None:
        super().__init__()
        size = abs(d_model) or 1
        self.inner = faults.Correct(size, size)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(size, size) for _ in range(4)
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return query + 0.0 * (0.0 if mask is None else mask.to(query)[0, 0])


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("CFG-3", "no exception was raised, though d_model .*only its adapter refused, afterwards"),
        (
            "MSK-12",
            "no exception was raised, though a mask of ones of dtype torch.float32 is not claimed",
        ),
    ],
)
def test_refusal_of_the_adapter_satisfies_no_clause(clause: str, message: str) -> None:
    for mask_shape in ("b s", "l s"):
        adapted = from_module(RefusesNothing, parameters=faults.PARAMETERS, mask_shape=mask_shape)
        verdict = expect_fail(adapted, clause)
        assert re.search(message, verdict.message)


def test_call_that_no_adapter_can_express_is_not_judged() -> None:
    """With `mask_numbers`, a mask of numbers would be taken for a boolean one."""
    adapted = from_module(RefusesNothing, parameters=faults.PARAMETERS, mask_numbers=True)
    case = Case(n_heads=2, head_dim=2, L=2, S=2)
    (unclaimed,) = (prop for prop in properties()["MSK-12"] if "unclaimed_dtype" in prop.name)
    with pytest.raises(Discard, match=r"takes boolean masks as numbers, which a mask of .* is not"):
        unclaimed.function(Session(adapted, case), case)


MISFITS: dict[str, tuple[Any, str]] = {
    "not a module": (lambda: from_module(int, parameters={}), "needs a torch.nn.Module class"),
    "unknown constructor": (
        lambda: from_module(Unrecognised, parameters={}),
        r"constructor \(pieces, parts, places\) has a known name of d_model",
    ),
    "no mask": (
        lambda: from_module(faults.Correct, parameters={}, mask=None, claims=Claims()),
        "takes no mask, but claims.masks is .'bool'.",
    ),
    "a list of parameters": (
        lambda: from_module(faults.Correct, parameters=["q_proj"]),  # type: ignore[arg-type]  # on purpose
        r"parameters must map w_q, .* to names in the module, but is \['q_proj'\]",
    ),
    "no such layer": (
        lambda: preflight(
            from_module(faults.Correct, parameters=faults.PARAMETERS | {"w_q": "query"})
        ),
        "has no 'query'; its parameters are q_proj.weight",
    ),
    "a projection left out": (
        lambda: preflight(from_module(faults.Correct, parameters={"w_q": "q_proj"})),
        "has no entry for w_k, w_v, b_k, b_v",
    ),
    "an unknown key": (
        lambda: preflight(
            from_module(faults.Correct, parameters=faults.PARAMETERS | {"weight": "q_proj"})
        ),
        "the known keys are w_q",
    ),
    "another shape": (
        lambda: preflight(from_module(Stacked, parameters=faults.PARAMETERS | {"w_q": "qkv"})),
        r"has the shape \(12, 4\), but should have \(4, 4\)",
    ),
    "a layout": (lambda: from_kernel(attend, layout="b h s d"), "must name b, h, l and d"),
    "a kernel with extras": (
        lambda: from_kernel(attend, claims=Claims(extras={"bias_kv"})),
        r"claims has the extras \['bias_kv'\].*adapt a module instead",
    ),
    "weights of another configuration": (
        lambda: from_kernel(attend).build(
            Config(8, 2, bias=False),
            Weights.random(Config(8, 2), 0),
            dtype=torch.float32,
            device="cpu",
        ),
        (
            r"Config\(d_model=8.* needs weights of the shapes \{'w_q': \(8, 8\).*but the weights"
            r" have .*'b_q': \(8,\)"
        ),
    ),
    "a builtin kernel": (
        lambda: from_kernel(torch.matmul),
        "wrap it in a Python function|known name of a mask",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit_is_explained_in_one_line(misfit: str) -> None:
    make, message = MISFITS[misfit]
    with pytest.raises(ImplementationError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)
