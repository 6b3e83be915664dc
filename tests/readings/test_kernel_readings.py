"""Plain functions that inference reads: layouts, required numbers, and added masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations import ImplementationError, from_kernel, resolve
from mha.implementations.discovery.resolve import as_resolved
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Weights
from mha.spec.claims import DTYPES
from support.judging import expect_conforms, expect_pass, verdict_of


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


def biased(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """(B, L, H, d), with a mask that is added."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if attn_bias is None else scores + attn_bias
    return (F.dropout(scores.softmax(-1), p) @ v).transpose(1, 2)


def merges(
    query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, mask: Tensor | None = None
) -> Any:
    """(B, H, L, d), but its context is (B, L, H * d)."""
    scores = query_layer @ key_layer.mT / query_layer.shape[-1] ** 0.5
    weights = (
        scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    ).softmax(-1)
    return (weights @ value_layer).transpose(1, 2).flatten(2), weights


def qkv_packed(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False, **_: object) -> Tensor:
    """(B, L, 3, H, d)."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal).transpose(1, 2)


def kv_packed(q: Tensor, kv: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """(B, H, L, d) and (B, 2, H, S, d)."""
    return F.scaled_dot_product_attention(q, *kv.unbind(1), attn_mask)


def of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """(B, H, L, d), but its context is (B, L, H, d); it reads groups of heads from a module."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))  # type: ignore[arg-type]  # a stand-in
    scores = query @ k.mT * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ v).transpose(1, 2), weights


LOWEST = ", where the lowest number of the dtype hides a key"


# The function, its layout, and rows of the report.
KERNELS = {
    batched: (
        "(b h) l d",
        {
            "inputs": "q, k, v, of shape (b*h, l, d)",
            "mask": "True = may attend, of shape '(b h) l s'",
        },
    ),
    splits: ("b l (h d)", {"given": "num_heads=n_heads, dropout_p=0.0", "mask": "none"}),
    scaled: ("b h l d", {"given": "sm_scale=1/sqrt(d_k)", "causal": "causal, aligned top_left"}),
    biased: ("b l h d", {"mask": f"broadcastable to (b, h, l, s){LOWEST}"}),
    merges: (
        "b h l d -> b l (h d)",
        {"inputs": "value_layer, of shape (b, h, l, d), the context (b, l, h*d)"},
    ),
    qkv_packed: (
        "b l 3 h d",
        {"inputs": "qkv, of shape (b, l, 3, h, d)", "causal": "causal, aligned top_left"},
    ),
    kv_packed: ("b 2 h l d", {"inputs": "q, kv, of shape (b, 2, h, l, d)"}),
    of_transformers: (
        "b h l d -> b l h d",
        {"given": "scaling=1/sqrt(d_k)", "weights": "returned per head"},
    ),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernel_is_read_as_it_is_and_conforms(kernel: object) -> None:
    layout, expected = KERNELS[kernel]  # type: ignore[index]  # its keys
    result = infer_kernel(kernel)  # type: ignore[arg-type]  # a function
    assert not [row for row in result.rows if "assumed" in row.evidence]
    found = {row.topic: row.finding for row in result.rows}
    assert all(found[topic].endswith(finding) for topic, finding in expected.items()), found
    assert result.implementation.layout == layout
    expect_conforms(result, ["SHP-1", "HED-1", "MSK-2", "CAU-2"])


@torch.compile(backend="eager", fullgraph=True)
def compiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compiled, by default, for 8 kinds of inputs at most."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


@pytest.mark.slow
def test_compiled_kernel_may_be_compiled_for_inputs_of_many_kinds() -> None:
    implementation = infer_kernel(compiled).implementation
    assert implementation.claims.mask_ranks == {1, 2, 3, 4}
    assert implementation.claims.dtypes == {"float64", "float32", "bfloat16", "float16"}
    expect_conforms(implementation, ["HED-1"])


class DotProduct(nn.Module):
    """Has neither sizes nor weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        weights = (
            scores if mask is None else scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        ).softmax(-1)
        return self.dropout(weights) @ value, weights


def test_module_without_sizes_and_weights_is_a_kernel() -> None:
    (resolved,) = resolve(f"{__file__}:DotProduct")
    assert resolved.inference is not None
    assert "from_kernel(\n    DotProduct(dropout=0.0),\n" in resolved.inference.declaration
    expect_conforms(resolved.implementation, ["HED-1", "MSK-2", "STA-6"])


def test_context_that_has_the_shape_of_weights_is_not_mistaken() -> None:
    """With S = d_k, the weights of `merges` have the shape of the query."""
    config, x = Config(8, 2), torch.randn(1, 4, 8)
    weights = Weights.random(config, 0, torch.float32)
    implementations = (infer_kernel(merges).implementation, resolve("loop")[0].implementation)
    outputs = [
        each.build(config, weights, dtype=torch.float32, device="cpu")(x, x, x).output
        for each in implementations
    ]
    torch.testing.assert_close(*outputs)


def test_declared_layout_is_one_of_heads() -> None:
    with pytest.raises(ImplementationError, match=r"layout must name b, h, l and d once each"):
        from_kernel(batched, layout="(h b) l d")
    with pytest.raises(ImplementationError, match=r"layout must name b, h, l and d once each"):
        from_kernel(batched, layout="b h l d -> b l d")


def of_one_key_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """All heads of the query share one key and one value, (B, 1, S, d_k)."""
    if k.shape[1] != 1 or v.shape[1] != 1:
        raise ValueError(f"key and value must have one head, not {k.shape[1]} and {v.shape[1]}")
    scores = torch.einsum("bhld,bsd->bhls", q, k[:, 0]) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    return torch.einsum("bhls,bsd->bhld", scores.softmax(-1), v[:, 0])


def test_kernel_may_have_one_key_head_for_all() -> None:
    claims = Claims(masks={"bool"}, multi_query=True, returns_weights=False, empty_row="uniform")
    implementation = from_kernel(of_one_key_head, claims=claims)
    assert infer_kernel(of_one_key_head).implementation.claims == replace(
        implementation.claims, dtypes=DTYPES
    )
    clauses = ["SHP-1", "SMX-1", "MSK-1", "MSK-2", "HED", "NUM-1"]
    expect_pass(implementation, "HED-1", "GRD-1", also=clauses)
    assert verdict_of(implementation, "GQA-1").status == "not_claimed"


def of_the_first_key_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Ignores the other heads, (B, H, S, d_k), of the key and the value."""
    return of_one_key_head(q, k[:, :1], v[:, :1], mask)


def test_kernel_that_ignores_key_heads_is_not_one_of_one_key_head() -> None:
    with pytest.raises(
        ImplementationError,
        match="it uses one key head and ignores the others; if all heads share it, claim",
    ):
        infer_kernel(of_the_first_key_head)


def of_fewer_key_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Each key head is that of several heads of the query, (B, H_kv, S, d_k)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return merges(q, k, v, mask)[0].unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


def test_fewer_key_heads_are_claimed() -> None:
    implementation = infer_kernel(of_fewer_key_heads).implementation
    assert implementation.claims.grouped_query
    expect_pass(implementation, "GQA-1")


def test_fewer_key_heads_are_not_claimed_where_one_alone_is_broadcast() -> None:
    assert not infer_kernel(scaled).implementation.claims.grouped_query


def of_even_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[-1] % 2:
        raise ValueError("an even width")
    return scaled(q, k, v, causal=False, sm_scale=q.shape[-1] ** -0.5)


def test_kernel_of_even_heads_is_tried_on_these() -> None:
    implementation = infer_kernel(of_even_heads).implementation
    assert implementation.claims.sizes.head_dim_multiple == 2
    expect_pass(implementation, also=["SHP-1", "HED-1", "GQA-1"])


def of_one_head(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As in tutorials, (L, d_k)."""
    scores = Q @ K.transpose(0, 1) / Q.shape[1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(Q.dtype).min)
    weights = torch.softmax(scores, dim=1)
    return weights @ V, weights


def test_kernel_of_one_head_is_called_for_each() -> None:
    result = infer_kernel(of_one_head)
    assert "Q, K, V, of shape (l, d)  [tested]" in result.report()
    declared = from_kernel(
        of_one_head, layout="l d", mask_shape="(b h) l s", claims=result.implementation.claims
    )
    clauses = ["SHP-1", "SHP-5", "MSK-1", "MSK-2", "HED-1", "GRD-1", "NUM-1"]
    for implementation in (result.implementation, declared):
        expect_pass(implementation, *clauses)


def over_the_queries(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Right for one head alone: of more axes, it normalises another one."""
    return torch.softmax(Q @ K.mT / Q.shape[-1] ** 0.5, dim=1) @ V


def test_kernel_that_takes_all_heads_and_is_wrong_for_them_is_not_one_of_one_head() -> None:
    with pytest.raises(ImplementationError, match="its output matches no formula of attention"):
        infer_kernel(over_the_queries)


def with_a_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Any = None, mask: Tensor | None = None
) -> Tensor:
    """As in jax, (B, L, H, d_k)."""
    scores = torch.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores - 3 * bias
    scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(query.dtype).min)
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), value)


def test_bias_beside_a_mask_is_not_judged() -> None:
    rows = {row.topic: row.finding for row in infer_kernel(with_a_bias).rows}
    assert rows["mask"] == "mask: True = may attend, broadcastable to (b, h, l, s)"
    assert rows["not judged"] == "bias"


class Core(nn.Module):
    """A kernel with options that no call reads."""

    def __init__(
        self, dropout: float = 0.0, window: int | None = None, softcap: bool = False
    ) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_options_of_a_class_without_weights_are_named_as_not_covered() -> None:
    inference = as_resolved(Core).inference
    assert inference
    assert inference.not_covered == ("window", "softcap=True")


def of_one_item(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As of ragged batches, (L, H, d_k)."""
    scores = torch.einsum("lhd,shd->hls", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hls,shd->lhd", scores.softmax(-1), v)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> Tensor:
    return torch.cat(
        [scaled(part, k, v, False, q.shape[-1] ** -0.5) for part in q.split(block_size, 2)], 2
    )


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        (of_one_item, "q, k, v, of shape (l, h, d)  [tested]"),
        (in_blocks, "block_size=16  [by name]"),
    ],
)
def test_kernel_of_one_item_or_of_tiles_of_a_given_size_is_read(kernel: Any, row: str) -> None:
    result = infer_kernel(kernel)
    assert row in result.report()
    expect_pass(result, "SHP-1", "HED-1", "GRD-1")


@torch.no_grad()
def without_a_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled(q, k, v, causal=False, sm_scale=q.shape[-1] ** -0.5)


def test_kernel_that_is_decorated_with_no_grad_claims_no_gradients() -> None:
    inference = infer_kernel(without_a_graph)
    assert not inference.implementation.claims.gradients
    row = "none: it is decorated with torch.no_grad()  [by its decorator]"
    assert row in inference.report()


def test_kernel_with_a_name_that_has_no_value_yet_is_read() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.ndim:
            return later
        return scaled(q, k, v, causal=False, sm_scale=q.shape[-1] ** -0.5)

    assert infer_kernel(attend).implementation.claims.gradients
    later = torch.zeros(())
