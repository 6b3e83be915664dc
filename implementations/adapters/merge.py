"""`from_merge`: judge a function that merges the partial results of two parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.formula import (
    Holder,
    allowed_by,
    capped,
    log_sum_exp,
    scores_of,
    weights_of,
)
from mha.spec import Claims, Config, Lse, Options, Output, Rounding, Weights, validate_call
from mha.spec.claims import Alignment

# (o_a, lse_a, o_b, lse_b) -> (o, lse)
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Partial = tuple[Tensor, Tensor]
# How often a result may be merged in one call of the judge; see `MergeAttention.split_keys`.
MOST_MERGES = 4


def from_merge(
    merge: Merge,
    *,
    lse: Lse | None = None,
    layout: str = "b h l d",
    claims: Claims | None = None,
    name: str | None = None,
) -> MergeImplementation:
    """Adapt a merge of partial results, as split keys, cascades and ring attention have one.

    It is judged as an attention that computes each part of the keys by the plain formula, in the
    dtype of the inputs, and merges the parts by this function (clause LSE-2).

    merge: called with the contexts and log-sum-exps of two parts, (o_a, lse_a, o_b, lse_b); it
        returns those of both together, of the same shapes. A part may have no key: its context is
        zeros, and its log-sum-exp what `lse.empty` says.
    lse: base, layout and dtype of the log-sum-exps; by default natural ones, (B, H, L), in float32.
    layout: the axes of the contexts, an einops pattern of b (batch), h (heads), l (length) and d
        (head_dim), such as "b l h d" or "(b l) h d".
    claims: by default masks, a causal flag, float64, float32, bfloat16 and float16, no gradients.
    name: by default that of the function.

    Raises ImplementationError for a layout that is not one of b, h, l and d, and for claims that
    the plain formula around it does not have.

    >>> import torch
    >>> def merge(o_a, lse_a, o_b, lse_b):
    ...     lse = torch.logaddexp(lse_a, lse_b)
    ...     safe = lse.masked_fill(lse == -torch.inf, 0.0)
    ...     o = o_a * (lse_a - safe).exp()[..., None] + o_b * (lse_b - safe).exp()[..., None]
    ...     return o.to(o_a.dtype), lse
    >>> from_merge(merge).claims.split_keys
    True
    """
    label = name or str(getattr(merge, "__name__", "merge"))
    axes = sorted(layout.replace("(", " ").replace(")", " ").split())
    if axes != ["b", "d", "h", "l"]:
        raise ImplementationError(
            f"{label}: layout must name b, h, l and d once each, as 'b h l d', but is {layout!r}"
        )
    lse = lse or Lse()
    if claims is None:
        claims = Claims(
            masks={"bool", "float"},
            returns_weights=False,
            gradients=False,
            dtypes={"float64", "float32", "bfloat16", "float16"},
            # The formula around the merge keeps its softmax in the accumulator.
            rounding=Rounding(softmax_stored=False, merges=MOST_MERGES, reductions=MOST_MERGES),
        )
    unknown = [field for field in ("dropout", "extras", "decodes") if getattr(claims, field)]
    if unknown:
        raise ImplementationError(
            f"{label}: claims has {', '.join(unknown)}, which the plain formula around a merge does"
            " not have"
        )
    claims = replace(
        claims,
        projections=False,
        weight_gradients=False,
        returns_weights=False,
        lse=lse,
        split_keys=True,
    )
    return MergeImplementation(label, claims, merge, layout)


@dataclass(frozen=True, eq=False)
class MergeImplementation:
    """A merge as an implementation; made by `from_merge`."""

    name: str
    claims: Claims
    merge: Merge
    layout: str

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> MergeAttention:
        """Put the plain formula around the merge.

        Raises ValueError for an invalid configuration.
        """
        config.validate()
        return MergeAttention(self, config)


class MergeAttention(Holder):
    """Attention whose keys are split into parts, which are merged one after another."""

    def __init__(self, adapter: MergeImplementation, config: Config) -> None:
        super().__init__()
        self.adapter, self.config = adapter, config
        self.claims = adapter.claims
        self.lse = adapter.claims.lse or Lse()
        self.sizes: tuple[int, ...] | None = None

    def split_keys(self, sizes: Sequence[int]) -> MergeAttention:
        """See `mha.spec.SplitKeys`."""
        other = MergeAttention(self.adapter, self.config)
        other.sizes = tuple(sizes)
        return other

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Attend to each part of the keys, and merge; see `mha.spec.Attention`."""
        options = Options(**given)
        validate_call(self.config, query, key, value, options.mask, masks=self.claims.masks)
        config = self.config
        q = rearrange(query, "b l (h d) -> b h l d", h=config.n_heads)
        k, v = (rearrange(x, "b l (h d) -> b h l d", h=config.kv_heads) for x in (key, value))
        repeats = config.n_heads // config.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        # As kernels do: sums in float32 where inputs are in half precision.
        wide = torch.promote_types(query.dtype, torch.float32)
        usual_scale = config.head_dim**-0.5 if self.claims.scale is None else self.claims.scale
        scores = capped(scores_of(q.to(wide), k.to(wide), options, usual_scale), options.softcap)
        allowed, bias = allowed_by(options, scores, self._alignment())
        parts = self._parts(scores + bias, allowed, v.to(wide), query.dtype)
        context, lse = parts[0]
        for part in parts[1:]:
            context, lse = self._merged(context, lse, *part)
        return Output(rearrange(context, "b h l d -> b l (h d)"), None, lse)

    def _alignment(self) -> Alignment:
        return self.claims.causal or self.claims.scores.alignment or "top_left"

    def _parts(
        self, scores: Tensor, allowed: Tensor, value: Tensor, dtype: torch.dtype
    ) -> list[Partial]:
        """Return the context (B, H, L, d_v) and the log-sum-exp (B, H, L) of each part."""
        keys = scores.shape[-1]
        sizes = self.sizes or (keys // 2, keys - keys // 2)
        parts = []
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            own, allowed_own = scores[..., part], allowed[..., part]
            # Values that no query sees may be NaN, and are not the merge's.
            hidden = ~allowed_own.any(2).unsqueeze(-1)
            own_value = value[:, :, part].masked_fill(hidden, 0.0)
            # Of no key at all, the context is zeros and the log-sum-exp -infinity.
            context = weights_of(own, allowed_own) @ own_value
            parts.append((context.to(dtype), self._declared(log_sum_exp(own, allowed_own), dtype)))
            start += size
        return parts

    def _declared(self, natural: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a log-sum-exp in the declared base and dtype, with that of an empty row."""
        lse = natural / self.lse.log_base
        if self.lse.empty == "+inf":
            lse = lse.masked_fill(lse == -math.inf, math.inf)
        return lse.to(self.lse.dtypes_for(dtype)[-1])

    def _merged(self, *partials: Tensor) -> Partial:
        """Call the merge with tensors in its own layouts, (o_a, lse_a, o_b, lse_b)."""
        batch, heads, _, width = partials[0].shape
        sizes = {"b": batch, "h": heads}
        contexts, lses = self.adapter.layout, self.lse.axes
        given = [
            rearrange(
                x, f"b h l d -> {contexts}" if x.ndim == 4 else f"b h l -> {lses}"
            ).contiguous()
            for x in partials
        ]
        context, lse = self.adapter.merge(*given)
        try:
            merged = rearrange(context, f"{contexts} -> b h l d", **sizes, d=width)
            merged_lse = rearrange(lse, f"{lses} -> b h l", **sizes)
        except EinopsError:
            raise ValueError(
                f"a merge returned the shapes {tuple(context.shape)} and {tuple(lse.shape)}, not"
                f" those of what it was given, {contexts!r} and {lses!r}"
            ) from None
        return merged, merged_lse
