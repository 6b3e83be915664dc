"""The rounding graph of attention: the exact forward pass, with each place where it may round.

The places, from `Rounding`: projected queries, keys and values, before and after the bias, and
scaled; scores, as the product, scaled, and with a float mask; differences, exponentials and sums of
the softmax; weights; contexts; and the output, before and after its bias. Over ranks, also parts of
contexts and outputs, whatever is on which rank. A key/value head is one place, however many query
heads share it. What it is for: `mha.spec.directed`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.spec.bounds import row_max
from mha.spec.claims import Claims
from mha.spec.dtypes import torch_dtype, traits_of
from mha.spec.graph_of_heads import Noted, Way
from mha.spec.head_steps import Step, steps_of
from mha.spec.heads import side_by_side
from mha.spec.problem import Problem
from mha.spec.rounding_places import Place, copies_of
from mha.spec.softmax import normaliser_error, rescales_of
from mha.spec.units import units_of

# d<w, y*> / dx of a place: a tensor for each use of the numbers, in each form that may be the one.
Uses = tuple[tuple[Tensor, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RoundingGraph:
    """The exact forward pass of one problem in float64, with its places. S counts extra keys.

    output: y*, (B, L, D).
    weights: p, (B, H, L, S).
    scores: tau q.k, without a mask, (B, H, L, S).
    query: (B, H, L, d_k).
    key, value: (B, H, S, d_k), each key/value head repeated for its query heads.
    context: o, (B, H, L, d_k).
    w_o: (D, H * d_k).
    allowed: boolean (B, H, L, S).
    known: boolean (B, L, 1), the rows with a key in every head; the others follow a policy, and no
        direction has a part in them.
    variance: W^2, (B, H, L, S).
    places: by name, as in `gradients`.
    kv_heads: how many key/value heads there are.
    tau: the scale.
    tau_error: its relative error, if it is stored.
    store: u_s.
    ways: those of queries and keys through a norm and a rotation, if there are any.
    """

    output: Tensor
    weights: Tensor
    scores: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    w_o: Tensor
    allowed: Tensor
    known: Tensor
    variance: Tensor
    places: Mapping[str, Place]
    kv_heads: int
    tau: float
    tau_error: float
    store: float
    ways: Sequence[Way] = ()

    def narrowed(self) -> RoundingGraph:
        """Return the graph in float32, for `mha.spec.directed.allowances` and `mha.spec.energy`."""
        names = ("weights", "scores", "query", "key", "value", "context", "w_o", "variance")
        narrow = {name: getattr(self, name).float() for name in names}
        return replace(self, ways=[way.narrowed() for way in self.ways], **narrow)

    def output_of(self, contexts: Tensor) -> Tensor:
        """Return what contexts (B, H, L, d_k) add to the output: W_o times them, (B, L, D)."""
        return side_by_side(contexts) @ self.w_o.T

    def gradients(self, w: Tensor) -> dict[str, Uses]:
        """Return d<w, y*> / dx for each place, by name: the backward pass, in closed form.

        A stored weight has two: where the sum of a row is of the stored numbers, it counts as v_j -
        o, else as v_j.
        """
        heads, p = self.context.shape[1], self.weights
        shared = (self.kv_heads, heads // self.kv_heads)
        # g_o = w W_o;  c_j = g_o.v_j;  g_s = p_j (c_j - g_o.o)
        g_o = (w @ self.w_o).unflatten(-1, (heads, -1)).transpose(1, 2)
        c = (g_o @ self.value.mT).masked_fill(p == 0, 0.0)
        mean = (g_o * self.context).sum(-1, keepdim=True)
        exponential = (c - mean).masked_fill(p == 0, 0.0)
        g_s = p * exponential
        # g_q = tau sum_j g_s k_j, and so on; a key/value head gets those of all its query heads
        g_k, g_v = self.tau * g_s.mT @ self.query, p.mT @ g_o
        found: dict[str, Uses] = {
            "query": ((self.tau * g_s @ self.key,),),
            "key": ((g_k.unflatten(1, shared).sum(2),),),
            "value": ((g_v.unflatten(1, shared).sum(2),),),
            "score": ((g_s,),),
            "exponential": ((exponential,),),
            "sum": ((mean,),),
            "weight": ((c, exponential),),
            "context": ((g_o,),),
            "output": ((w,),),
        }
        for way in self.ways:
            found |= way.gradients(found[way.name][0][0])
        return found


def rounding_graph(problem: Problem, claims: Claims) -> RoundingGraph:
    """Return the graph of a problem.

    Raises ValueError for a dtype that is not narrower than its accumulator.

    >>> from mha.spec import Config, Weights
    >>> config, x = Config(d_model=8, n_heads=2), torch.ones(2, 5, 8).bfloat16()
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x)
    >>> rounding_graph(problem, Claims()).output.shape
    torch.Size([2, 5, 8])
    """
    if not traits_of(problem.query.dtype).half:
        raise ValueError(f"a rounding graph is for half precision, not for {problem.query.dtype}")
    return _Maker(problem, claims).graph()


class _Maker:
    """Solves a problem in float64, and notes each place where a number may be stored."""

    def __init__(self, problem: Problem, claims: Claims) -> None:
        self.problem, self.claims, self.rounding = problem, claims, claims.rounding
        self.dtype, self.config = problem.query.dtype, problem.config
        self.units, self.tau = units_of(self.dtype, self.rounding), problem.scale(claims)
        self.places: dict[str, Place] = defaultdict(Place)
        self.ways = list[Way]()
        self.largest = torch.zeros(())  # the largest magnitude of a row's scores, (B, H, L)

    def graph(self) -> RoundingGraph:
        """Solve the problem, from the projections to the output."""
        extra, repeats = self.config.extra_keys, self.config.n_heads // self.config.kv_heads
        query, (key, bare_key), (value, _) = self._query(), self._pair("key"), self._pair("value")
        k, bare, v = (x.repeat_interleave(repeats, 1) for x in (key, bare_key, value))
        allowed = F.pad(self.problem.allowed(self.claims.alignment), (0, extra), value=True)
        scores = self._scores(query, (k, bare))
        p = self._softmax(scores, self._mask(scores, allowed), allowed)
        context = self._context(p, v, allowed)
        output, bare_output = self._linear("output", side_by_side(context), "o")
        self._parts(p, v, context, bare_output)
        return RoundingGraph(
            output=output,
            weights=p,
            scores=scores,
            value=v,
            context=context,
            w_o=self.problem.weights.w_o.detach().double(),
            allowed=allowed,
            known=allowed.any(-1).all(1).unsqueeze(-1),
            tau=self.tau,
            tau_error=self._tau_error(),
            query=query,
            key=k,
            kv_heads=self.config.kv_heads,
            places=dict(self.places),
            variance=self._variance(query, k, repeats).masked_fill(~allowed, 0.0),
            store=self.units.store,
            ways=self.ways,
        )

    def _stored(self, name: str, copies: Tensor, *forms: tuple[Tensor, float | Tensor]) -> None:
        """Note a store; see `Place.store`."""
        self.places[name].store(self.dtype, self.units, copies, *forms)

    def _linear(self, name: str, x: Tensor, role: str, grow: int = 0) -> tuple[Tensor, Tensor]:
        """Return x W^T + b and x W^T, stored before and after the bias; in heads, if not "o".

        grow: how many rows of zeros to append, for extra keys.
        """
        weight, bias = self.problem.weights.of(role)
        matrix = weight.detach().double()

        def arrange(y: Tensor) -> Tensor:
            if role == "o":
                return y
            heads = y.unflatten(-1, (-1, self.config.width_of(role))).transpose(1, 2)
            return F.pad(heads, (0, 0, 0, grow))

        x = x.detach().double()
        if not self.config.projected:
            return arrange(x), arrange(x)
        product, size = x @ matrix.T, x.abs() @ matrix.abs().T
        shift = x.new_zeros(len(matrix)) if bias is None else bias.detach().double()
        y, bare = arrange(product + shift), arrange(product)
        copies = copies_of(bare)
        self._stored(name, copies, (bare, 1.0))
        if bias is not None:
            self._stored(name, copies, (y, 1.0))
        self.places[name].own += self.units.gamma(matrix.shape[1] + 1) * arrange(size + shift.abs())
        return y, bare

    def _parts(self, p: Tensor, value: Tensor, context: Tensor, output: Tensor) -> None:
        """Note what ranks store before they merge contexts, or add up outputs.

        That is each part, and all sums but the last.
        """
        ranks, lost = self.rounding.ranks, self.units.subnormal + self.units.flush
        if ranks == 1 or not self.rounding.partials_stored:
            return
        stores = 2 * (ranks - 1)
        span = p @ value.abs()
        self.places["context"].store_parts(copies_of(context), context, span, stores, lost)
        if not self.config.projected:
            return  # The output is the contexts: nothing is added up.
        matrix, bias = self.problem.weights.of("o")
        heads = matrix.detach().double().unflatten(1, (context.shape[1], -1)).transpose(0, 1)
        span = (context @ heads.mT).abs().sum(1)
        if bias is not None:  # each rank may add its share, which is the same in every row
            whole = bias.detach().double().expand_as(output)
            self._stored("output", copies_of(whole), (whole / ranks, 1 / ranks))
            output, span = output + whole, span + whole.abs()
        self.places["output"].store_parts(copies_of(output), output, span, stores, lost)

    def _query(self) -> Tensor:
        if steps := self._steps("q"):
            projected, _ = self._linear("projected query", self.problem.query, "q")
            query = self._on_the_way("query", steps, projected)
        else:
            query, _ = self._linear("query", self.problem.query, "q")
        self._scaled("query", query)
        self._quantised("query", query)
        return query

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the keys or values with the extra ones, and the same without their bias.

        The second is the first where the bias may not be left out.
        """
        config, given, steps = self.config, self.problem.weights, self._steps(name[0])
        place = f"projected {name}" if steps else name
        y, bare = self._linear(place, getattr(self.problem, name), name[0], config.extra_keys)
        if steps:
            y = bare = self._on_the_way(name, steps, y)
        if config.extra_keys:
            own = y.shape[2] - config.extra_keys
            if config.bias_kv:
                extra: Tensor = getattr(given, f"extra_{name[0]}")
                y[:, :, own] = extra.detach().double().unflatten(0, (-1, config.width_of(name[0])))
            bare = y
        if name == "key":
            self._scaled(name, y, bare)
            self._quantised(name, y, bare)
        else:
            self._quantised(name, y)
        return y, bare

    def _steps(self, role: str) -> list[Step]:
        return steps_of(self.problem, self.claims, role, self.dtype)

    def _on_the_way(self, name: str, steps: Sequence[Step], x: Tensor) -> Tensor:
        """Return projected heads that are normed and rotated, and note what is stored."""
        heads, way = Noted(name, self.dtype, self.units, self.places).through(steps, x)
        self.ways.append(way)
        return heads

    def _quantised(self, name: str, *forms: Tensor) -> None:
        """Note that heads are stored in float8, and then in the dtype again, if it is declared."""
        if self.rounding.heads_stored:
            copies, dtype = copies_of(forms[0]), torch_dtype(self.rounding.heads_stored)
            self.places[name].quantise(dtype, self.units.store, copies, *forms)
            self._stored(name, copies, *((x, 1.0) for x in forms))

    def _scaled(self, name: str, *forms: Tensor) -> None:
        """Note that queries or keys are stored once scaled, by the scale or by its root."""
        if self.rounding.scaling_roundings:
            factors = (self.tau, math.sqrt(abs(self.tau)))
            # Inputs are exact, and many of them equal: how they round together is known, and
            # `Place.moves` has it.
            copies = torch.ones_like(forms[0])
            if self.config.projected:
                copies = copies_of(forms[0])
            self._stored(name, copies, *((f * x, f) for x in forms for f in factors))

    def _scores(self, query: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
        """Return tau q.k; both the product and the scaled product may be stored."""
        both = [self.tau * query @ key.mT for key in keys]
        if self.rounding.scores_stored:
            copies, scaled = copies_of(both[0]), [(s, 1.0) for s in both]
            products = []  # a scale of 0 leaves nothing of their rounding
            if self.tau:
                products = [(s / self.tau, 1 / self.tau) for s in both]
            self._stored("score", copies, *scaled, *products)
            self._stored("score", copies, *scaled)
        size = torch.stack([query.abs() @ key.abs().mT for key in keys]).amax(0)
        self.places["score"].own += self.units.gamma(query.shape[-1] + 4) * abs(self.tau) * size
        self.largest = torch.stack([row_max(s.abs()) for s in both]).amax(0)
        return both[0]

    def _mask(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the scores with the mask, -infinity where it forbids; 0 in an empty row."""
        mask = self.problem.mask
        if mask is not None and mask.is_floating_point():
            bias = F.pad(mask.double().expand(self.problem.shape), (0, self.config.extra_keys))
            bias = bias.masked_fill(~allowed, 0.0)
            scores, self.largest = scores + bias, self.largest + row_max(bias.abs())
            self.places["score"].own += self.units.accumulate * (scores.abs() + 2 * bias.abs())
            if self.rounding.scores_stored:
                rounds = bias.to(self.dtype).double() != bias
                self._stored("score", copies_of(bias), (bias.where(rounds, 0.0), 1.0))
                self._stored("score", copies_of(scores), (scores, 1.0))
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)

    def _softmax(self, scores: Tensor, masked: Tensor, allowed: Tensor) -> Tensor:
        """Return the weights p; see `mha.spec.core` for what a softmax may be wrong by."""
        rounding, u_a = self.rounding, self.units.accumulate
        gap = (row_max(masked).unsqueeze(-1) - masked).masked_fill(~allowed, 0.0)
        e = (-gap).exp().masked_fill(~allowed, 0.0)
        total = e.sum(-1, keepdim=True).clamp(min=1.0)
        p = e / total
        exponentials = rounding.exponentials + rescales_of(masked, rounding)
        own = 3 * u_a * gap + exponentials * (rounding.exponential(half=True) + 4) * u_a
        self.places["score"].own += own
        # Where the weights are not made of the exponentials of the sum, a row may be off as a
        # whole.
        self.apart = (p * own).sum(-1, keepdim=True)
        # The largest exponential of a row is 1 and the weight of an only key is 1, without
        # rounding.
        copies = torch.where(e == 1, copies_of(p), torch.maximum(copies_of(p), copies_of(e)))
        if rounding.softmax_stored:
            self._stored("score", copies, (-gap, 1.0))
            self._stored("exponential", copies, (e.where(e != 1, 0.0), total))
            self._stored("sum", copies_of(total), (total.where(total != 1, 0.0), total))
        if rounding.weights_stored:
            rounds = p != 1
            forms = (p.where(rounds, 0.0), 1.0), (e.where(rounds, 0.0), total)
            self._stored("weight", copies, *forms)
        return p

    def _context(self, p: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Return the contexts o."""
        context, place = p @ value, self.places["context"]
        gamma = self.units.gammas(allowed.sum(-1, keepdim=True).clamp(min=1).double())
        if self.rounding.log_normaliser:
            u_a, merges = self.units.accumulate, self.rounding.merges
            gamma = gamma + normaliser_error(self.largest, value.shape[2], u_a, merges) + self.apart
        # (2 gamma(n) + 4 u_a) sum_j p_j |v_j|
        place.own += (2 * gamma + 4 * self.units.accumulate) * (p @ value.abs())
        self._stored("context", copies_of(context), (context, 1.0))
        return context

    def _variance(self, query: Tensor, key: Tensor, repeats: int) -> Tensor:
        """Return W^2, (B, H, L, S): what each store does to a log-weight, squared, and summed.

        It is not the square of their sum: independent errors add up so, and a score is a sum of
        many.
        """
        of_query = self._squares("query", query)
        of_key = self._squares("key", key[:, ::repeats]).repeat_interleave(repeats, 1)
        of_products = of_query @ key.square().mT + query.square() @ of_key.mT
        stored = self.places["score"].square + (2.0 if self.rounding.softmax_stored else 0.0)
        return self.units.store**2 * (self.tau**2 * of_products + stored)

    def _squares(self, name: str, x: Tensor) -> Tensor:
        """Return what the stores of queries or keys, and on their way, do to them, squared."""
        for way in self.ways:
            if way.name == name:
                return Noted(name, self.dtype, self.units, self.places).variance(way, x)
        return self.places[name].squares(x)

    def _tau_error(self) -> float:
        """Return the relative error of a scale, or of a divisor, that is stored in the dtype."""
        if not self.rounding.scaling_roundings or not self.tau:  # a scale of 0 is stored exactly
            return 0.0
        scale = torch.tensor([self.tau, 1 / self.tau], dtype=torch.float64)
        return float((scale.to(self.dtype).double() / scale - 1).abs().max())
