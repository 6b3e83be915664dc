"""Kernels with every option, right and wrong, in plain torch: for `judge_kernel` and its page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from mha.spec import Claims, Lse, Scores, Window, window_mask

Kernel = Callable[..., Any]
# What every kernel here claims; without `sinks` and `lse`, what torch's own kernels do.
PLAIN = Claims(
    projections=False,
    weight_gradients=False,
    returns_weights=False,
    masks={"bool"},
    causal="bottom_right",
    grouped_query=True,
    value_width=True,
    scores=Scores(scale="positive", window=Window("left_right")),
    dtypes={"bfloat16"},
)
CLAIMS = replace(
    PLAIN, scores=replace(PLAIN.scores, sinks="float32", softcap="before_bias"), lse=Lse()
)
# Of a kernel without options; and in float32 only, which is what the probes need.
BARE = replace(PLAIN, masks=(), causal=None, scores=replace(PLAIN.scores, window=None, scale=None))
SINGLE = replace(BARE, dtypes={"float32"}, grouped_query=False, value_width=False)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The right context, in float32."""
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


@dataclass(frozen=True, eq=False)
class Given:
    """One call: the tensors, each key head repeated for its query heads, and what hides keys.

    allowed: boolean, broadcastable to (B, H, L, S).
    scale: what the scores are multiplied by.
    sinks: (H,), or None.
    softcap: 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    scale: float
    sinks: Tensor | None = None
    softcap: float = 0.0

    @property
    def scores(self) -> Tensor:
        """The scores (B, H, L, S), -infinity where a query may not attend."""
        s = self.query @ self.key.mT * self.scale
        if self.softcap:
            s = self.softcap * (s / self.softcap).tanh()
        return s.masked_fill(~self.allowed, -math.inf)


Attend = Callable[[Given], tuple[Tensor, Tensor]]


def bounds_of(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """The keys before and after a query's own; None for no bound, for which calls say -1."""
    left, right = window_size
    return (None if left < 0 else left), (None if right < 0 else right)


def kernel_of(attend: Attend, change: Callable[[Given], Given] = lambda given: given) -> Kernel:
    """A kernel with every option of `CLAIMS`, made of one step, and of a change of what it gets."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        queries, keys = query.shape[2], key.shape[2]
        left, right = bounds_of(window_size)
        if is_causal:
            right = 0
        allowed = window_mask(queries, keys, (left, right), "bottom_right", query.device)
        if attn_mask is not None:
            allowed = allowed & attn_mask
        repeats = query.shape[1] // key.shape[1]
        given = Given(
            query,
            key.repeat_interleave(repeats, 1),
            value.repeat_interleave(repeats, 1),
            allowed,
            query.shape[-1] ** -0.5 if scale is None else scale,
            sinks,
            softcap,
        )
        context, lse = attend(change(given))
        return context.to(query.dtype), lse.float()

    return kernel


def eager(given: Given) -> tuple[Tensor, Tensor]:
    """Attend as the formula says, in the dtype of the inputs."""
    s = given.scores
    empty = ~given.allowed.any(-1, keepdim=True)
    if given.sinks is not None:
        column = given.sinks.to(s).view(-1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
        empty = empty & (column == -math.inf)
    p = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    # torch has no log-sum-exp that adds up half precision in float32.
    lse = s.float().logsumexp(-1)
    return p[..., : given.key.shape[2]] @ given.value, lse


def in_float32(given: Given) -> tuple[Tensor, Tensor]:
    """Attend in float32, whatever the dtype of the inputs is."""
    wide = (x.float() for x in (given.query, given.key, given.value))
    query, key, value = wide
    return eager(replace(given, query=query, key=key, value=value))


def online(given: Given) -> tuple[Tensor, Tensor]:
    """Attend by an online softmax over tiles of keys, with sums in float32."""
    query, value = given.query.float(), given.value.float()
    rows = (*query.shape[:3], 1)
    largest = query.new_full(rows, -math.inf)
    total, sums = query.new_zeros(rows), query.new_zeros(*rows[:3], value.shape[-1])
    if given.sinks is not None:
        largest = given.sinks.float().view(-1, 1, 1).expand(rows)
        total = (largest > -math.inf).float()
    wide = replace(given, query=query, key=given.key.float()).scores
    for start in range(0, value.shape[2], 32):
        s = wide[..., start : start + 32]
        grown = torch.maximum(largest, s.amax(-1, keepdim=True))
        top = grown.masked_fill(grown == -math.inf, 0.0)
        p, kept = (s - top).exp(), (largest - top).exp()
        total = total * kept + p.sum(-1, keepdim=True)
        rounded = p.to(given.value.dtype).float()
        sums = sums * kept + rounded @ value[:, :, start : start + 32]
        largest = grown
    empty = total == 0
    context = (sums / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    return context, (largest + total.log()).squeeze(-1)


def of_backend(backend: SDPBackend) -> Kernel:
    """SDPA by one backend, of what `PLAIN` claims."""

    def attend(given: Given) -> tuple[Tensor, Tensor]:
        """Attend by torch, and give the rows without a key zeros."""
        queries, keys = given.query.shape[2], given.key.shape[2]
        mask = given.allowed.expand(len(given.query), given.query.shape[1], queries, keys)
        if bool(mask.all()):
            mask = None
        with sdpa_kernel(backend):
            context = scaled_dot_product_attention(
                given.query, given.key, given.value, attn_mask=mask, scale=given.scale
            )
        return context, context

    def kernel(*inputs: Tensor, **options: Any) -> Tensor:
        if inputs[0].shape[-1] != inputs[2].shape[-1] and backend is SDPBackend.FLASH_ATTENTION:
            # It takes values of another width no more than other kernels for flash attention.
            return kernel_of(in_float32)(*inputs, **options)[0]
        return kernel_of(attend)(*inputs, **options)[0]

    return _with_parameters(kernel)


def flex(given: Given) -> tuple[Tensor, Tensor]:
    """Attend by flex_attention, without its compiler."""
    allowed = given.allowed.expand(*given.query.shape[:3], given.key.shape[2])

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(allowed[b, h, i, j], score, -math.inf)

    with torch.compiler.set_stance("force_eager"):
        context = flex_attention(
            given.query, given.key, given.value, score_mod=modify, scale=given.scale
        )
    empty = ~given.allowed.any(-1, keepdim=True)
    return context.masked_fill(empty, 0.0), context


def _with_parameters(kernel: Kernel) -> Kernel:
    """The same kernel with the parameters of `PLAIN`."""

    def named(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        return kernel(query, key, value, window_size=window_size, **options)

    return named


RIGHT: dict[str, tuple[Kernel, Claims]] = {
    "eager in the dtype": (kernel_of(eager), CLAIMS),
    "eager in float32": (kernel_of(in_float32), CLAIMS),
    "online softmax": (kernel_of(online), CLAIMS),
    "SDPA, math": (of_backend(SDPBackend.MATH), PLAIN),
    "SDPA, flash": (of_backend(SDPBackend.FLASH_ATTENTION), PLAIN),
    "flex_attention": (_with_parameters(lambda *x, **o: kernel_of(flex)(*x, **o)[0]), PLAIN),
}


def _keys(given: Given, kept: Tensor) -> Given:
    """Only some keys, as long as a row keeps one of those it may see."""
    allowed = given.allowed & kept
    return replace(
        given, allowed=torch.where(allowed.any(-1, keepdim=True), allowed, given.allowed)
    )


def every_second_key(given: Given) -> Given:
    """Read every second key."""
    return _keys(given, torch.arange(given.key.shape[2]) % 2 == 0)


def without_last_keys(given: Given) -> Given:
    """Leave out the last 16 keys."""
    return _keys(given, torch.arange(given.key.shape[2]) < given.key.shape[2] - 16)


def without_rotary_part(given: Given) -> Given:
    """Leave out the last eighth of the columns of each head in the scores, as MLA has its rotary
    part there.
    """
    width = given.query.shape[-1]
    kept = width - width // 8
    return replace(given, query=given.query[..., :kept], key=given.key[..., :kept])


def scale_off(given: Given) -> Given:
    """Multiply the scores by 1.01 more."""
    return replace(given, scale=1.01 * given.scale)


def other_key_head(given: Given) -> Given:
    """Read the keys and values of the next head."""
    return replace(given, key=given.key.roll(1, 1), value=given.value.roll(1, 1))


def window_off(given: Given) -> Given:
    """Show each query one key before its window too."""
    places = torch.arange(given.key.shape[2])
    first = given.allowed.int().argmax(-1, keepdim=True)
    sees_some = given.allowed.any(-1, keepdim=True)
    return replace(given, allowed=given.allowed | ((places == first - 1) & sees_some))


def not_causal_at_the_end(given: Given) -> Given:
    """Show the queries of the last tile of 16 all keys after theirs."""
    queries = given.query.shape[2]
    late = torch.arange(queries).unsqueeze(1) >= queries - 16
    places = torch.arange(given.key.shape[2])
    last = (places * given.allowed).amax(-1, keepdim=True)
    return replace(given, allowed=given.allowed | (late & (places > last)))


def without_sink(given: Given) -> Given:
    """Leave out the sink."""
    return replace(given, sinks=None)


def _changed(change: Callable[[Tensor, Given], Tensor]) -> Attend:
    """The right context with a change."""

    def attend(given: Given) -> tuple[Tensor, Tensor]:
        context, lse = in_float32(given)
        return change(context, given), lse

    return attend


def _mean(context: Tensor, given: Given) -> Tensor:
    return given.value.float().mean(2, keepdim=True).expand_as(context)


def _garbage(context: Tensor, given: Given) -> Tensor:
    """Garbage in 0.9% of the rows, but in one at least."""
    rows = context.flatten(0, 2).clone()
    step = 111
    rows[min(step, len(rows)) - 1 :: step] = 1.0
    return rows.view(context.shape)


def _base_2(given: Given) -> tuple[Tensor, Tensor]:
    context, lse = in_float32(given)
    return context, lse / math.log(2)


# By name: the kernel, and whether it is of attention with a causal window, or with sinks, which
# the inputs of a benchmark then have.
IMPOSTORS: dict[str, tuple[Kernel, str]] = {
    "zeros": (kernel_of(_changed(lambda context, given: 0 * context)), ""),
    "mean of the values": (kernel_of(_changed(_mean)), ""),
    "every second key": (kernel_of(in_float32, every_second_key), ""),
    "rotary part left out": (kernel_of(in_float32, without_rotary_part), ""),
    "last 16 keys dropped": (kernel_of(in_float32, without_last_keys), ""),
    "scale 1% off": (kernel_of(in_float32, scale_off), ""),
    "garbage in 0.9% of rows": (kernel_of(_changed(_garbage)), ""),
    "another head's output": (kernel_of(_changed(lambda context, _: context.roll(1, 1))), ""),
    "another head's keys": (kernel_of(in_float32, other_key_head), ""),
    "same norm, other order": (kernel_of(_changed(lambda context, _: context.flip(-1))), ""),
    "window off by one": (kernel_of(in_float32, window_off), "window"),
    "last tile not causal": (kernel_of(in_float32, not_causal_at_the_end), "causal"),
    "sink ignored": (kernel_of(in_float32, without_sink), "sinks"),
    "lse to the base 2": (kernel_of(_base_2), "lse"),
}
