"""One call of a kernel as the judge reads it, and its oracle, block by block.

The formula and the bounds are those of `mha.spec.core`; here is only which rows it gets at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.layouts import Layout
from mha.spec.bounds import Ball
from mha.spec.claims import Claims
from mha.spec.core import CHUNK, attend
from mha.spec.forward import declared_lse, with_sinks
from mha.spec.heads import Heads, Precision
from mha.spec.masks import bias_at, distances_of, in_chunk, in_window
from mha.spec.scores import Alibi, Lse, Options, Scores, Window

# The most numbers of keys and values in float64 at once, unless one head has more.
MOST_OF_KEYS = 1 << 20
# What is claimed of a kernel of which nothing else is said; its alignment must be.
USUAL = Claims(
    projections=False,
    weight_gradients=False,
    returns_weights=False,
    masks={"bool", "float"},
    grouped_query=True,
    value_width=True,
    scores=Scores(
        scale="any",
        window=Window("left_right"),
        softcap="before_bias",
        sinks="float32",
        alibi=Alibi("signed"),
    ),
    lse=Lse(),
)


@dataclass(frozen=True, eq=False)
class Block:
    """The oracle's results for some rows; the axes are item, key head, query head of it, row, d_v.

    items, heads, group, rows: where they are, along each axis.
    context: (b, h, g, l, d_v).
    lse: (b, h, g, l).
    """

    items: slice
    heads: slice
    group: slice
    rows: Tensor
    context: Ball
    lse: Ball


@dataclass(frozen=True, eq=False)
class Call:
    """The tensors and the options of one call.

    query: (B, H, L, d_k).
    key: (B, H_kv, S, d_k).
    value: (B, H_kv, S, d_v).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    claims: Claims

    @classmethod
    def of(
        cls,
        inputs: Sequence[Tensor] | Mapping[str, Tensor],
        options: Options | Mapping[str, Any] | None,
        claims: Claims | None,
        layout: str = "b h l d",
        heads: int | None = None,
    ) -> Call:
        """Read a call; the parameters are those of `judge_output`.

        Raises ValueError for shapes that do not fit together, and for a causal mask, a window or a
        bias of slopes whose alignment nobody says.
        """
        if isinstance(inputs, Mapping):
            inputs = [inputs[name] for name in ("query", "key", "value")]
        options = _options(options)
        axes = Layout.read(layout)
        query, key, value = _heads(axes, inputs, heads)
        call = cls(query.detach(), key.detach(), value.detach(), options, claims or USUAL)
        call._require_shapes()
        is_placed = options.is_causal or options.window or options.chunk or options.alibi
        if claims is None and is_placed and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{query.shape[2]} queries and {key.shape[2]} keys: claims=Claims(causal=...) must"
                " say whether the causal mask and the window are aligned top_left or bottom_right"
            )
        return call

    def _require_shapes(self) -> None:
        """Raise ValueError unless the inputs fit together."""
        q, k, v = self.query.shape, self.key.shape, self.value.shape
        fits = q[0] == k[0] == v[0] and q[3] == k[3] and k[1:3] == v[1:3]
        if not fits or not k[1] or q[1] % k[1]:
            raise ValueError(
                f"query, key and value must be (B, H, L, d_k), (B, H_kv, S, d_k) and (B, H_kv, S,"
                f" d_v) with H a multiple of H_kv, but are {tuple(q)}, {tuple(k)} and {tuple(v)}"
            )
        sinks, slopes = self.options.sinks, self.options.alibi
        if sinks is not None and len(sinks) != q[1]:
            raise ValueError(f"sinks must be a number for each of {q[1]} heads")
        if slopes is not None and torch.tensor(slopes).shape not in ((q[1],), q[:2]):
            raise ValueError(f"alibi must be a number for each of {q[1]} heads, or of (item, head)")
        if self.options.key_lengths is not None or self.options.query_lengths is not None:
            raise ValueError("lengths of items are not judged here: give one item at a time")

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def scale(self) -> float:
        """What the scores are multiplied by."""
        if self.options.scale is None:
            return self.claims.scale_for(self.query.shape[-1])
        return float(self.options.scale)

    @property
    def rows(self) -> Tensor:
        """The places of all queries."""
        return torch.arange(self.query.shape[2], device=self.query.device)

    def context_shape(self) -> tuple[int, ...]:
        """Return the shape of the context, (B, H, L, d_v)."""
        return (*self.query.shape[:3], self.value.shape[-1])

    def of_groups(self, x: Tensor) -> Tensor:
        """Return a tensor (B, H, ...) as (B, H_kv, G, ...)."""
        grouped: Tensor = x.unflatten(1, (self.key.shape[1], self.group))
        return grouped

    def distances(self, rows: Tensor) -> Tensor:
        """Return how far each key is behind the place of these queries, integers (l, S)."""
        alignment = self.claims.alignment or "top_left"
        return distances_of(rows, self.query.shape[2], self.key.shape[2], alignment)

    def allowed(self, items: slice, heads: slice, group: slice, rows: Tensor) -> Tensor:
        """Return which keys these queries may attend to, boolean (b, h, g, l, S)."""
        mask = self.mask_at(items, heads, group, rows)
        shape = self._shape(items, heads, group, rows)
        allowed = torch.ones(shape, dtype=torch.bool, device=rows.device)
        if mask is not None:
            forbidding = float("-inf") if mask.is_floating_point() else 0
            allowed = allowed & (mask != forbidding)
        distances = self.distances(rows)
        if self.options.is_causal:
            allowed = allowed & (distances <= 0)
        if self.options.window is not None:
            allowed = allowed & in_window(distances, self.options.window)
        if self.options.chunk is not None:
            allowed = allowed & in_chunk(distances, self.options.chunk)
        return allowed

    def bias(self, items: slice, heads: slice, group: slice, rows: Tensor) -> Tensor | None:
        """Return the float mask and the bias of slopes, added up, (b, h, g, l, S), or None."""
        bias, shape = None, self._shape(items, heads, group, rows)
        mask = self.mask_at(items, heads, group, rows)
        if mask is not None and mask.is_floating_point():
            bias = mask.double().expand(shape)
        slopes = self.options.alibi
        if slopes is None:
            return bias
        declared = self.claims.scores.alibi or Alibi("signed")
        of_slope_one = bias_at(self.distances(rows), declared.form)
        of_item = torch.tensor(slopes, dtype=torch.float64, device=rows.device)
        of_item = self.of_groups(of_item.expand(self.query.shape[:2]))
        of_slopes = of_item[items, heads, group, None, None] * of_slope_one
        return of_slopes.expand(shape) if bias is None else bias + of_slopes

    def sinks(self, heads: slice, group: slice, rows: Tensor) -> Tensor:
        """Return the sinks of these rows, (h, g, l)."""
        assert self.options.sinks is not None
        sinks = self._of_heads(self.options.sinks)[heads, group, None]
        return sinks.expand(-1, -1, len(rows))

    def _of_heads(self, numbers: Sequence[float]) -> Tensor:
        """Return a number for each head in float64, (H_kv, G)."""
        device = self.query.device
        whole = torch.as_tensor(numbers, dtype=torch.float64, device=device).detach()
        return whole.view(self.key.shape[1], self.group)

    def mask_at(self, items: slice, heads: slice, group: slice, rows: Tensor) -> Tensor | None:
        """Return the mask of these queries, broadcastable to (b, h, g, l, S), or None."""
        if self.options.mask is None:
            return None
        mask: Tensor = self.options.mask.detach()
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        batch, of_heads, queries, _ = mask.shape
        kv_heads = self.key.shape[1]
        # An axis of size 1 is broadcast.
        mask = mask.unflatten(1, (kv_heads, self.group) if of_heads > 1 else (1, 1))
        if batch > 1:
            mask = mask[items]
        if of_heads > 1:
            mask = mask[:, heads, group]
        if queries > 1:
            mask = mask[:, :, :, rows]
        return mask

    def _shape(self, items: slice, heads: slice, group: slice, rows: Tensor) -> tuple[int, ...]:
        axes = self.query.shape[0], self.key.shape[1], self.group
        sizes = []
        for part, size in zip((items, heads, group), axes, strict=True):
            sizes.append(len(range(size)[part]))
        return (*sizes, len(rows), self.key.shape[2])


def _options(options: Options | Mapping[str, Any] | None) -> Options:
    """Return options, of which sinks and slopes may be given as tensors."""
    if options is None:
        return Options()
    if isinstance(options, Mapping):
        options = Options(**options)
    changes = {}
    for name in ("sinks", "alibi"):
        given = getattr(options, name)
        if isinstance(given, Tensor):
            changes[name] = tuple(given.detach().double().tolist())
    return options.change(**changes)


def _heads(
    axes: Layout, inputs: Sequence[Tensor], heads: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with the axes (B, H, length, d)."""
    query, key, value = inputs
    sizes = {} if heads is None else {"h": heads}
    q = axes.to_contract(query, sizes)
    # Keys may have fewer heads than queries, and values another width.
    k = axes.to_contract(key, {"d": q.shape[-1], "b": q.shape[0]})
    return q, k, axes.to_contract(value, {"h": k.shape[1], "b": q.shape[0]})


def blocks(call: Call, rows: Tensor) -> Iterator[Block]:
    """Yield the oracle's results for all heads of these rows, in the order of their places.

    A block has at most `CHUNK` scores and `MOST_OF_KEYS` numbers of keys and values, unless one
    query, or one head, has more. So its temporaries stay below a few hundred MiB.
    """
    precision = Precision.of(call.query.dtype, call.claims.rounding)
    for items, heads in _parts_of_keys(call, len(rows)):
        key = Ball.exact(call.key[items, heads])
        value = Ball.exact(call.value[items, heads])
        for group, some in _parts_of_rows(call, rows):
            yield _solved(call, precision, (items, heads, group, some), key, value)


def _parts_of_keys(call: Call, queries: int) -> Iterator[tuple[slice, slice]]:
    """Yield items and key heads: several at once where they are small, and of items, all heads."""
    batch, kv_heads, keys, width = call.key.shape
    of_keys = keys * (width + call.value.shape[-1])
    at_once = max(1, MOST_OF_KEYS // max(1, of_keys))
    at_once = min(at_once, max(1, CHUNK // max(1, call.group * queries * keys)))
    items_at_once = max(1, at_once // kv_heads)
    heads_at_once = min(at_once, kv_heads)
    for item in range(0, batch, items_at_once):
        for head in range(0, kv_heads, heads_at_once):
            yield slice(item, item + items_at_once), slice(head, head + heads_at_once)


def _parts_of_rows(call: Call, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield query heads of a key head, and rows: of several heads only where all rows fit."""
    keys = max(1, call.key.shape[2])
    heads_at_once = max(1, CHUNK // (keys * max(1, len(rows))))
    rows_at_once = max(1, CHUNK // keys)
    for head in range(0, call.group, heads_at_once):
        for some in rows.split(rows_at_once):
            yield slice(head, min(head + heads_at_once, call.group)), some


def _solved(
    call: Call,
    precision: Precision,
    place: tuple[slice, slice, slice, Tensor],
    key: Ball,
    value: Ball,
) -> Block:
    """Return the results of one block: the rows of the heads that share a key are rows of it."""
    items, of_keys, group, rows = place
    claims, options = call.claims, call.options
    query = call.of_groups(call.query)[items, of_keys, group][:, :, :, rows]
    size = query.shape[2:4]
    allowed = call.allowed(*place).flatten(2, 3)
    bias = call.bias(*place)
    heads = Heads(
        query=Ball.exact(query.flatten(2, 3)),
        key=key,
        value=value,
        allowed=allowed,
        bias=None if bias is None else Ball.exact(bias.flatten(2, 3)),
        cap=options.softcap or None,
        caps_bias=claims.scores.softcap == "after_bias",
    )
    empty = heads.empty.squeeze(-1)
    declared = claims.lse or Lse()
    if options.sinks is not None:
        sinks = call.sinks(of_keys, group, rows).flatten(1).unsqueeze(-1)
        heads = replace(with_sinks(heads, sinks), sink_in_lse=declared.sink)
        empty = heads.empty.squeeze(-1)
    attended = attend(heads, call.scale, precision, claims.empty_row)
    lse = declared_lse(attended.make_lse(), declared, call.query.dtype, empty)
    return Block(
        items,
        of_keys,
        group,
        rows,
        attended.context.known().rearranged(lambda x: x.unflatten(2, size)),
        lse.rearranged(lambda x: x.unflatten(2, size)),
    )
