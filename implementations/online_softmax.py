"""An online softmax in plain torch, with every option: splits of the keys, tiles, and a merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Alibi, Claims, Lse, Rounding, Scores, Window
from mha.spec.claims import COMPUTE_DTYPES

TILE = 32


@dataclass(frozen=True)
class Part:
    """The softmax over some of the keys.

    highest: the largest score of each row, (B, H, L, 1), -infinity without any key.
    total: the sum of exp(score - highest), of the same shape.
    context: the sum of exp(score - highest) times the value, (B, H, L, d_v).
    """

    highest: Tensor
    total: Tensor
    context: Tensor

    @classmethod
    def of(cls, scores: Tensor, v: Tensor) -> Part:
        """Return that of scores (B, H, L, tile) and values (B, H, tile, d_v)."""
        # What scores are shifted by changes nothing, and has no gradient.
        highest = scores.detach().amax(-1, keepdim=True)
        raised = exp_difference(scores, highest)
        hidden = (scores == -math.inf).all(2).unsqueeze(-1)
        return cls(highest, raised.sum(-1, keepdim=True), raised @ v.masked_fill(hidden, 0.0))

    def merged(self, other: Part) -> Part:
        """Return the softmax over the keys of both."""
        highest = torch.maximum(self.highest, other.highest)
        own, others = exp_difference(self.highest, highest), exp_difference(other.highest, highest)
        return Part(
            highest,
            self.total * own + other.total * others,
            self.context * own + other.context * others,
        )

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the context, and the log-sum-exp (B, H, L): zeros and -infinity without a key."""
        is_empty = self.highest == -math.inf
        total = self.total.masked_fill(is_empty, 1.0)
        lse = (self.highest + total.log()).masked_fill(is_empty, -math.inf)
        return self.context / total, lse.squeeze(-1)


def exp_difference(score: Tensor, highest: Tensor) -> Tensor:
    """Return exp(score - highest), which is 0 for a score of -infinity, even if both are."""
    return (score - highest.masked_fill(highest == -math.inf, 0.0)).exp()


@dataclass(frozen=True)
class Scoring:
    """What a call says about the scores.

    places: of the queries among the keys of their item, (B, 1, L, 1).
    keys: how many keys an item has, (B, 1, 1, 1).
    is_query: which queries are of an item, (B, 1, L, 1).
    mask: broadcastable to (B, H, L, S), or None.
    slopes: (B or 1, H, 1, 1), or None.
    """

    scale: float
    softcap: float
    places: Tensor
    keys: Tensor
    is_query: Tensor
    mask: Tensor | None
    slopes: Tensor | None
    causal: bool
    window: tuple[int, int]
    chunk: int

    def of_tile(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        """Return the scores (B, H, L, tile) of keys at places t, -infinity where one is hidden."""
        scores = self.scale * (q @ k.mT)
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.slopes is not None:
            scores = scores - self.slopes * (t - self.places).abs()
        allowed = self.seen(t)
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-1:] in ((), (1,)) else self.mask[..., t]
            allowed = allowed & (mask if mask.dtype == torch.bool else mask != -math.inf)
            if mask.is_floating_point():
                scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
        return scores.masked_fill(~allowed, -math.inf)

    def seen(self, t: Tensor) -> Tensor:
        """Return which keys at places t each query sees, boolean (B, 1, L, tile)."""
        left, right = self.window
        seen = (t < self.keys) & self.is_query
        if self.causal:
            seen = seen & (t <= self.places)
        if left >= 0:
            seen = seen & (t >= self.places - left)
        if right >= 0:
            seen = seen & (t <= self.places + right)
        if self.chunk:
            chunk = self.places.div(self.chunk, rounding_mode="floor")
            seen = seen & (t // self.chunk == chunk)
        return seen


def attend(  # noqa: PLR0913  what a kernel of today takes
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context (B, H, L, d_v), and on request the log-sum-exp (B, H, L).

    The arguments are those of `mha.implementations.kernel_loop`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, queries = lengths_of(k, seqused_k), lengths_of(q, seqused_q)
    rows = torch.arange(q.shape[2], device=q.device).view(-1, 1)
    scoring = Scoring(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        places=rows + keys - queries,
        keys=keys,
        is_query=rows < queries,
        mask=mask,
        slopes=None if alibi_slopes is None else alibi_slopes.view(-1, q.shape[1], 1, 1),
        causal=causal,
        window=window_size,
        chunk=attention_chunk,
    )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(wide) for x in (k, v))
    whole = first_part(q, v, sinks)
    for split in halves(k):
        whole = whole.merged(of_keys(q.to(wide), k, v, split, scoring))
    context, lse = whole.results()
    context = context.to(q.dtype).masked_fill(~scoring.is_query, 0.0)
    return (context, lse) if return_lse else context


def lengths_of(x: Tensor, used: Tensor | None) -> Tensor:
    """Return how many positions each item has, (B, 1, 1, 1)."""
    if used is None:
        used = torch.full((len(x),), x.shape[2], device=x.device)
    return used.view(-1, 1, 1, 1)


def first_part(q: Tensor, v: Tensor, sinks: Tensor | None) -> Part:
    """Return the softmax over the sink of each head, a key with a value of zeros; or over none."""
    if sinks is None:
        sinks = v.new_full((q.shape[1],), -math.inf)
    scores = sinks.to(v.dtype).view(-1, 1, 1).expand(*q.shape[:3], 1)
    return Part.of(scores, v.new_zeros(*v.shape[:2], 1, v.shape[-1]))


def halves(k: Tensor) -> tuple[Tensor, ...]:
    """Return the places of the keys in two parts, as a kernel splits them in decoding."""
    return torch.arange(k.shape[2], device=k.device).tensor_split(2)


def of_keys(q: Tensor, k: Tensor, v: Tensor, places: Tensor, scoring: Scoring) -> Part:
    """Return the softmax over the keys at some places, tile after tile."""
    part = first_part(q, v, None)
    if not len(places):
        return part
    for t in places.split(TILE):
        scores = scoring.of_tile(q, k[:, :, t], t)
        part = part.merged(Part.of(scores, v[:, :, t]))
    return part


implementation = from_kernel(
    attend,
    name="online_softmax",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        causal="bottom_right",
        returns_weights=False,
        grouped_query=True,
        value_width=True,
        scores=Scores(
            scale="any",
            window=Window("left_right"),
            chunk=True,
            softcap="before_bias",
            sinks="float32",
            alibi=Alibi("symmetric", per_item=True),
        ),
        lse=Lse(gradient=True),
        lengths="both",
        repeats="both",
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            scores_stored=False,
            weights_stored=False,
            softmax_stored=False,
            scaling_roundings=0,
            merges=1,
        ),
    ),
)
