"""A failure shows its last call in the words of the user's own code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.diagnosis.arguments import arguments_of
from mha.conformance.faults.base import CLAIMS
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.known_bad.defect import KnownBad
from mha.conformance.harness.session import Session
from mha.implementations import from_kernel, from_module
from mha.spec import Claims

LIMITS: dict[str, Any] = {
    "causal": None,
    "returns_weights": False,
    "per_head_mask": False,
    "per_query_mask": False,
}


class LengthFirst(nn.Module):
    """Unscaled attention, length first, with one input for key and value, and a mask of padding."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inputs = zip((self.q, self.k, self.v), (x, context, context), strict=True)
        q, k, v = (
            layer(y).unflatten(-1, (self.n_heads, -1)).permute(1, 2, 0, 3) for layer, y in inputs
        )
        scores = q @ k.mT
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2))


module = from_module(
    LengthFirst,
    parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"},
    mask="drop",
    mask_shape="b s",
    layout="l b d",
    claims=Claims(cross_attention="memory", bias={True}, **LIMITS),
)


def kernel(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)


def variadic(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, is_causal=kwargs["is_causal"])


def call(target: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return target(query, key, value, is_causal=options["is_causal"], hook=object())


CASES = {
    "variadic": (
        from_kernel(
            variadic,
            call=call,
            mask=None,
            claims=Claims(masks=(), causal="top_left", returns_weights=False),
        ),
        Case(n_heads=2, head_dim=6, causal=True),
    ),
    "module": (module, Case(B=2, L=3, S=4, mask="padding", inputs="memory")),
    "kernel": (
        from_kernel(
            kernel, claims=Claims(causal="top_left", returns_weights=False, masks={"bool", "float"})
        ),
        Case(B=2, L=3, S=4, n_heads=2, head_dim=5, mask="full_bias", causal=True),
    ),
    "protocol": (KnownBad(REJECTED["correct"], CLAIMS), Case()),
}
EXPECTED = {
    "variadic": (
        "args[0] (1, 2, 1, 6), args[1] (1, 2, 1, 6), args[2] (1, 2, 1, 6), is_causal True, hook"
        " object"
    ),
    "module": "x (3, 2, 1), context (4, 2, 1), attention_mask (2, 4) bool",
    "kernel": (
        "q (2, 2, 3, 5), k (2, 2, 4, 5), v (2, 2, 4, 5), attn_mask (2, 2, 3, 4), is_causal True"
    ),
    "protocol": "",
}


@pytest.mark.parametrize("kind", CASES)
def test_last_call_is_shown_by_its_own_names(kind: str) -> None:
    implementation, case = CASES[kind]
    session = Session(implementation, case)
    session(case.problem())
    assert arguments_of(session) == EXPECTED[kind]


def test_failure_has_its_last_call() -> None:
    (verdict,) = check(module, "quick", clauses="SMX-6", dtypes="float32").verdicts
    assert verdict.status == "fail"
    assert verdict.arguments.startswith("x (")


def test_construction_that_fails_has_no_call() -> None:
    (verdict,) = check(module, "quick", clauses="CFG-2", dtypes="float32").verdicts
    assert (verdict.status, verdict.arguments) == ("fail", "")


def test_arguments_are_those_of_the_attention_that_was_called() -> None:
    implementation, case = CASES["kernel"]
    session, problem = Session(implementation, case), case.problem()
    other = replace(case, n_heads=4, head_dim=3).problem()
    session.build(other.config, other.weights)
    session(problem, via=session.built(problem))
    session.build(other.config, other.weights)
    session(problem)
    assert arguments_of(session) == EXPECTED["kernel"]
