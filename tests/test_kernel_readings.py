"""Conventions of plain functions that inference reads: layouts, required numbers, and masks that are added."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance import check
from mha.implementations import ImplementationError, from_kernel
from mha.implementations.inference.kernels import infer_kernel


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Of items times heads, (B * H, L, d)."""
    scores = torch.bmm(q, k.mT) / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    return torch.bmm(scores.softmax(-1), v)


def splits(query: Tensor, key: Tensor, value: Tensor, num_heads: int, dropout_p: float) -> Tensor:
    """Of heads side by side, (B, L, H * d)."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value))
    weights = F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout_p)
    return (weights @ v).transpose(1, 2).flatten(2)


def scaled(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Of heads, and whose caller scales and decides."""
    scores = q @ k.mT * sm_scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & causal
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def biased(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, p: float = 0.0) -> Tensor:
    """(B, L, H, d), with a mask that is added."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if attn_bias is None else scores + attn_bias
    return (F.dropout(scores.softmax(-1), p) @ v).transpose(1, 2)


# The function, its layout, and rows of the report.
KERNELS = {
    batched: (
        "(b h) l d",
        {"inputs": "q, k, v, of shape (b*h, l, d)", "mask": "True = may attend, of shape '(b h) l s'"},
    ),
    splits: ("b l (h d)", {"given": "num_heads=n_heads, dropout_p=0.0", "mask": "none"}),
    scaled: ("b h l d", {"given": "sm_scale=1/sqrt(d_k)", "causal": "causal, aligned top_left"}),
    biased: ("b l h d", {"mask": "attn_bias: added to the scores, broadcastable to (b, h, l, s)"}),
}


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernel_is_read_as_it_is_and_conforms(kernel: object) -> None:
    layout, expected = KERNELS[kernel]  # type: ignore[index]  # its keys
    result = infer_kernel(kernel)  # type: ignore[arg-type]  # a function
    assert not [row for row in result.rows if "assumed" in row.evidence]
    found = {row.topic: row.finding for row in result.rows}
    assert all(found[topic].endswith(finding) for topic, finding in expected.items()), found
    assert result.implementation.layout == layout
    report = check(result.implementation, "quick", clauses=["SHP-1", "HED-1", "MSK-2", "CAU-2"], dtypes=["float32"])
    assert report.conforms, report.failing


@torch.compile(backend="eager", fullgraph=True)
def compiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compiled, by default, for 8 kinds of inputs at most."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def test_compiled_kernel_may_be_compiled_for_inputs_of_many_kinds() -> None:
    implementation = infer_kernel(compiled).implementation
    assert implementation.claims.mask_ranks == {1, 2, 3, 4}
    assert implementation.claims.dtypes == {"float64", "float32", "bfloat16", "float16"}
    assert check(implementation, "quick", clauses=["HED-1"], dtypes=["float32"]).conforms


def test_declared_layout_is_one_of_heads() -> None:
    with pytest.raises(ImplementationError, match=r"layout must name b, h, l and d once each"):
        from_kernel(batched, layout="(h b) l d")
