"""Calls in common conventions: masks instead of a causal flag, rotations, and `*args`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.conformance import check
from mha.implementations import ImplementationError, from_kernel
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.implementations.inference.probes import CONFIG
from mha.implementations.inference.understanding import _choices
from mha.spec import Claims, Config
from support.judging import expect_conforms


def causal_unless_masked(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=attn_mask is None)


def where_allowed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`torch.where` lays out the scores as the mask, so sums may be in another order."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if mask is None else torch.where(mask, scores, -1e30)
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    raised = raised if mask is None else raised * mask
    context: Tensor = raised / raised.sum(-1, keepdim=True).clamp(min=1e-30) @ v
    return context


def merged(q: Tensor, k: Tensor, v: Tensor, num_heads: int = 4) -> Tensor:
    """Heads that it splits itself."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def repeats_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, num_heads: int = 1
) -> Tensor:
    """A number of heads that is not that of the model."""
    mask = None if mask is None else mask.repeat_interleave(num_heads, 0)
    return F.scaled_dot_product_attention(q, k, v, mask)


def not_beside_a_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, autoregressive: bool = True
) -> Tensor:
    """Causal, or masked."""
    if autoregressive and mask is not None:
        raise ValueError("either")
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=autoregressive)


class Self(nn.Module):
    """Self-attention, with a rotation if it is given one."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        Config(dim, n_heads).validate()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [layer(x).unflatten(-1, (self.n_heads, -1)) for layer in (self.wq, self.wk, self.wv)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class Complex(Self):
    """Rotary positions as complex numbers (L, d_k / 2)."""

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(self.rotated(q, freqs_cis), self.rotated(k, freqs_cis), v)

    def rotated(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(
            x.float().unflatten(-1, (-1, 2)) if x.dtype.itemsize < 8 else self.wide(x)
        )
        assert freqs_cis.shape == (x.shape[1], x.shape[-1] // 2)
        return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).to(x)

    def wide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2))


class RealPairs(Complex):
    """As in gpt-fast: cosines and sines in one tensor (L, d_k / 2, 2)."""

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        freqs_cis = freqs_cis.view(x.shape[1], -1, 2).to(x)
        return super().forward(x, torch.view_as_complex(freqs_cis))


class ByColumn(Complex):
    """Rotary positions as tables of two axes, (L, d_k), for columns that are halves of pairs."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]  # by name
        assert cos.shape == (x.shape[1], x.shape[-1] // self.n_heads)
        q, k, v = self.heads(x)
        return self.attend(_turned(q, cos, sin), _turned(k, cos, sin), v)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos[None, :, None] + torch.cat((-other, one), -1) * sin[None, :, None]


class Pairs(Self):
    """Rotary positions as cosines and sines (L, d_k / 2)."""

    def forward(self, x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(
            self.rotated(q, freqs_cos, freqs_sin), self.rotated(k, freqs_cos, freqs_sin), v
        )

    def rotated(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
        cosines, sines = (
            each.view(1, x.shape[1], 1, x.shape[-1] // 2) for each in (cosines, sines)
        )
        return torch.stack(
            (one * cosines - other * sines, one * sines + other * cosines), -1
        ).flatten(3)


class FullWidth(Self):
    """Cosines and sines of each column."""

    def forward(self, x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(*(t * freqs_cos + t.roll(1, -1) * freqs_sin for t in (q, k)), v)


class Guarded(Self):
    """Unpacks what it may be given, which need not be complex."""

    def forward(self, x: Tensor, freqs_cis: Any) -> Tensor:
        q, k, v = self.heads(x)
        if freqs_cis is not None:
            cosines, sines = freqs_cis
            q, k = (t * cosines + t.roll(1, -1) * sines for t in (q, k))
        return self.attend(q, k, v)


class Starred(Self):
    """Takes what else there may be, and ignores it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.attend(*self.heads(x))


class Cached(Self):
    """Writes keys to a cache of so many items."""

    def __init__(
        self, dim: int, n_heads: int, max_batch_size: int = 4, max_seq_len: int = 64
    ) -> None:
        super().__init__(dim, n_heads)
        cache = torch.zeros(max_batch_size, max_seq_len, n_heads, dim // n_heads)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.cache[: x.shape[0], : x.shape[1]] = k.detach()
        return self.attend(q, k, v)


def test_kernel_is_causal_unless_it_is_given_a_mask() -> None:
    result = infer_kernel(causal_unless_masked)
    assert "causal_by_default=True" in result.declaration
    expect_conforms(result, ["HED-1", "CAU", "MSK-1", "MSK-4"])


def test_masks_of_another_memory_order_may_be_summed_in_another_order() -> None:
    implementation = from_kernel(where_allowed, claims=Claims(returns_weights=False))
    assert check(implementation, "default", dtypes="float32", clauses="MSK-5").conforms


def test_number_of_heads_is_given_where_it_has_a_default_too() -> None:
    result = infer_kernel(merged)
    assert "num_heads=n_heads" in result.report()
    expect_conforms(result, ["HED-1"])


def test_number_of_heads_keeps_its_default_where_heads_are_split_already() -> None:
    result = infer_kernel(repeats_mask)
    assert "num_heads=n_heads" not in result.report()
    assert "masks" in result.declaration


def test_flag_of_a_function_that_is_not_passed_keeps_its_default() -> None:
    with pytest.raises(ImplementationError, match="either"):
        infer_kernel(not_beside_a_mask)


@pytest.mark.parametrize(("cls", "layout"), [(RealPairs, "l p 2"), (ByColumn, "l r")])
def test_rotation_that_a_call_requires_is_given_before_other_readings_are_tried(
    cls: type[Self], layout: str
) -> None:
    empty = Candidate(Declared(cls, "attention"))
    choices = _choices(empty, cls(CONFIG.d_model, CONFIG.n_heads))
    assert {each.declared.rotation_layout for each in choices[0]} == {layout}
    assert {each.declared.layout for each in choices[0]} == {"b l d", "l b d"}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (Complex, "rotation_pairs=True"),
        (RealPairs, 'rotation_layout="l p 2"'),
        (Pairs, "freqs_sin=0 of shape (l, d_k / 2)"),
        (FullWidth, "freqs_cos=1, freqs_sin=0"),
        (Guarded, "freqs_cis=None"),
        (Starred, ""),
        (Cached, "largest batch"),
    ],
)
def test_class_is_read_and_judged(cls: type[nn.Module], given: str) -> None:
    result = infer(cls)
    assert given in result.report()
    assert "softmax(q k^T / sqrt(d_k)) v W_o" in result.report()
    expect_conforms(result, ["HED-1", "NUM-1", "SHP-1"])
