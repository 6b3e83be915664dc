"""The rounding graph of the backward pass: the exact gradients, and each place where it may round.

As in `mha.spec.backward`, for an output's gradient dY, inputs x and weights W,

    dC = dY W_o    dP = dC V^T    D = rowsum(P dP) = dC.o    dS = P (dP - D)
    dQ = tau dS K  dK = tau dS^T Q  dV = P^T dC  dx = dX W  dW = dX^T x  dW_o = dY^T C

The places, besides those of the forward pass: dC; dP and D, with the products that D sums, and what
the backward pass of a softmax makes of them step by step; dS, before and after it is scaled; dQ,
dK, dV; and the gradients themselves.

Parts of a sum may be stored: of each head, and of each input that shares a tensor, for dx; of each
item for dW; and of up to `PARTS` parts of the queries or keys for dQ, dK and dV, such as the chunks
that autograd adds up; over ranks, also those of each rank.

What it is for: `mha.spec.directed_gradients`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.backward import SOFTMAX_STEPS
from mha.spec.claims import Claims
from mha.spec.heads import side_by_side
from mha.spec.problem import INPUTS, Problem
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from mha.spec.rounding_places import Place, copies_of
from mha.spec.softmax import normaliser_error
from mha.spec.units import units_of

# Into how many parts the queries or the keys may be split, with partial sums that are stored.
PARTS = 8
# How often dP and D are stored where the softmax is one step: dP alone, then in the products P dP
# that D sums.
SUM_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class GradientGraph:
    """The exact gradients of one problem in float64, with its places.

    exact: the gradients by name; inputs that are one tensor have one, under the first of their
        names.
    problem: whose they are.
    forward: its graph.
    upstream: dY, (B, L, D).
    d_context: dC, (B, H, L, d_k).
    d_weight: dP, (B, H, L, S).
    row_sum: D, (B, H, L, 1).
    d_score: dS, (B, H, L, S).
    heads: dQ, dK and dV by role, for the key/value heads.
    places: by name.
    differentiates_maximum: whether the softmax may differentiate the maximum of a row.
    """

    exact: Mapping[str, Tensor]
    problem: Problem
    forward: RoundingGraph
    upstream: Tensor
    d_context: Tensor
    d_weight: Tensor
    row_sum: Tensor
    d_score: Tensor
    heads: Mapping[str, Tensor]
    places: Mapping[str, Place]
    differentiates_maximum: bool

    def narrowed(self) -> GradientGraph:
        """Return the graph in float32, except for the exact gradients."""
        heads = {role: x.float() for role, x in self.heads.items()}
        names = ("upstream", "d_context", "d_weight", "row_sum", "d_score")
        narrow = {name: getattr(self, name).float() for name in names}
        return replace(self, forward=self.forward.narrowed(), heads=heads, **narrow)

    def of_weights(self, change: Tensor, *, of_sum: bool = True) -> dict[str, Tensor]:
        """Return how the gradients move if only the weights of the backward pass move.

        change: of the weights, (B, H, L, S).
        of_sum: whether the row sum D moves with them.
        """
        d_p, weights = self.d_weight, self.forward.weights
        moved = (change * d_p).sum(-1, keepdim=True) if of_sum else 0.0
        return self.joined(self.core(change * (d_p - self.row_sum) - weights * moved, change))

    def core(self, d_score: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Return dQ, dK and dV, by role, for some dS and P, (B, H, L, S)."""
        forward = self.forward
        return {
            "q": forward.tau * d_score @ forward.key,
            "k": self.grouped(forward.tau * d_score.mT @ forward.query),
            "v": self.grouped(weights.mT @ self.d_context),
        }

    def joined(self, heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of inputs and weights, by name, from dQ, dK and dV."""
        found: dict[str, Tensor] = {}
        for name, roles in shared_roles(self.problem).items():
            source, of_input = wide_of(self.problem, name), list[Tensor]()
            of_weights = dict[str, Tensor]()
            for role in roles:
                flat = side_by_side(heads[role][:, :, : source.shape[1]])
                of_input.append(flat @ wide_of(self.problem, f"w_{role}"))
                of_weights[f"w_{role}"] = _summed(flat, source)
            found[name] = torch.stack(of_input).sum(0)
            found |= of_weights
        return found

    def grouped(self, x: Tensor) -> Tensor:
        """Sum (B, H, S, d_k) over the query heads of each key/value head."""
        summed: Tensor = x.unflatten(1, (self.forward.kv_heads, -1)).sum(2)
        return summed


def gradient_graph(problem: Problem, claims: Claims, upstream: Tensor) -> GradientGraph:
    """Return the graph of the gradients of sum(output * upstream), for rows that all have a key.

    upstream: (B, L, D). Raises ValueError for a dtype that is not narrower than its accumulator.

    >>> from mha.spec import Config, Weights
    >>> config = Config(d_model=8, n_heads=2)
    >>> x = torch.linspace(-2, 2, 80).reshape(2, 5, 8).bfloat16()
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x.clone(), x.clone())
    >>> graph = gradient_graph(problem, Claims(), x)
    >>> list(graph.exact)
    ['query', 'w_q', 'key', 'w_k', 'value', 'w_v', 'w_o']
    """
    if claims.changes_heads:
        raise ValueError("a graph of gradients has no norm and no rotation of queries and keys")
    return _Maker(problem, claims, upstream.detach().double()).graph()


class _Maker:
    """Differentiates a problem in float64, and notes each place where a number may be stored."""

    def __init__(self, problem: Problem, claims: Claims, upstream: Tensor) -> None:
        self.problem, self.claims, self.upstream = problem, claims, upstream
        self.rounding, self.dtype = claims.rounding, problem.query.dtype
        self.units = units_of(self.dtype, self.rounding)
        self.forward = rounding_graph(problem, claims)
        self.places: dict[str, Place] = defaultdict(Place, self.forward.places)
        # How the output itself is stored is nothing to its gradients.
        self.places.pop("output", None)
        allowed = self.forward.allowed
        self.n_query = allowed.sum(3).unsqueeze(-1).double()
        self.n_key = allowed.sum(2).unsqueeze(-1).double()

    def graph(self) -> GradientGraph:
        """Differentiate the problem, from the output to the inputs."""
        forward = self.forward
        p, value = forward.weights, forward.value
        d_c = self._context_gradient()
        d_p = d_c @ value.mT
        d = (p * d_p).sum(-1, keepdim=True)
        d_s = p * (d_p - d)
        self._softmax(d_c, d_p, d, d_s)
        graph = GradientGraph(
            exact={},
            problem=self.problem,
            forward=forward,
            upstream=self.upstream,
            d_context=d_c,
            d_weight=d_p,
            row_sum=d,
            d_score=d_s,
            heads={},
            places=self.places,
            differentiates_maximum=self.rounding.softmax_stored,
        )
        heads = graph.core(d_s, p)
        self._heads(graph, heads)
        exact = graph.joined(heads)
        exact["w_o"] = _summed(self.upstream, side_by_side(forward.context))
        self._gradients(heads, exact)
        return replace(graph, heads=heads, exact=exact)

    def _stored(self, name: str, x: Tensor, times: int = 1, span: Tensor | None = None) -> None:
        """Note so many stores of x, or of partial sums, the last of which is x.

        span: sum |x_i|, of what is added up; by default |x|.
        """
        copies, lost = copies_of(x), self.units.subnormal + self.units.flush
        self.places[name].store(self.dtype, self.units, copies, (x, 1.0))
        if span is None:
            span = x.abs()
        if times > 1:
            self.places[name].store_parts(copies, x, span, times - 1, lost)

    def _context_gradient(self) -> Tensor:
        """Return dC = dY W_o."""
        config, weight = self.problem.config, self.forward.w_o
        heads = (config.n_heads, config.value_dim)
        d_c: Tensor = (self.upstream @ weight).unflatten(-1, heads).transpose(1, 2)
        if not config.projected:
            return d_c
        size = (self.upstream.abs() @ weight.abs()).unflatten(-1, heads).transpose(1, 2)
        self._stored("d_context", d_c)
        self.places["d_context"].own += self.units.gamma(len(weight) + config.n_heads + 1) * size
        return d_c

    def _softmax(self, d_c: Tensor, d_p: Tensor, d: Tensor, d_s: Tensor) -> None:
        """Note what is stored between dC and dS, and what accumulates."""
        forward, places, units, rounding = self.forward, self.places, self.units, self.rounding
        p, value, context = forward.weights, forward.value, forward.context
        u_a, width = units.accumulate, value.shape[-1]
        if rounding.scores_stored:
            steps = SOFTMAX_STEPS if rounding.softmax_stored else SUM_STEPS
            self._stored("d_weight", d_p, steps)
            self._stored("row_sum", d, steps)
            self._stored("product", d_c * context)
        self._stored("d_score", d_s, 4 if rounding.scores_stored else 2)
        of_steps = SOFTMAX_STEPS * u_a
        of_product, gamma = units.gamma(width + 1), units.gammas(self.n_query + 1)
        lost = (width + p.shape[-1] + 4) * units.flush
        size = d_c.abs() @ value.abs().mT
        places["d_weight"].own += of_product * size + of_steps * d_p.abs() + lost
        # D in both of its forms: sum_c |dC_c| |o_c|, and sum_j P_j |dC|.|v_j|
        total = (d_c.abs() * context.abs()).sum(-1, keepdim=True) + (p * size).sum(-1, keepdim=True)
        places["row_sum"].own += (gamma + of_product + of_steps) * total + lost
        places["d_score"].own += of_steps * p * (d_p.abs() + d.abs()) + lost
        if rounding.softmax_stored:
            # Beside the maximum of a row, the sum of what it gets is accumulated.
            places["d_score"].own += gamma * (p * (d_p.abs() + d.abs()))
        places["recomputed"].own += self._error_of_recomputed() * p

    def _error_of_recomputed(self) -> Tensor:
        """Return the relative error of weights that are recomputed, (B, H, L, 1).

        The weights of a row share the error of its normaliser, that of their sum, and those of its
        exponentials, which are not their own.
        """
        forward, units, rounding = self.forward, self.units, self.rounding
        u_a, keys, drift = units.accumulate, forward.weights.shape[-1], torch.zeros(())
        apart = 2 * rounding.exponentials * (rounding.exponential(half=True) + 4) * u_a
        if keys:
            largest = forward.scores.abs().amax(-1)
            drift = normaliser_error(largest, keys, u_a, rounding.merges)
        return 2 * units.gammas(self.n_query.clamp(min=1)) + 4 * u_a + apart + drift

    def _heads(self, graph: GradientGraph, heads: Mapping[str, Tensor]) -> None:
        """Note what is stored of dQ, dK and dV: parts, those of query heads, and their sums."""
        forward, tau = self.forward, self.forward.tau
        repeats = self.problem.config.n_heads // forward.kv_heads
        bias, key = self.problem.weights.b_k, forward.key.abs()
        if bias is not None:  # keys may be without it
            rows = bias.detach().double().abs().unflatten(0, (forward.kv_heads, 1, -1))
            key = key + rows.repeat_interleave(repeats, 0)
        d_s, p = graph.d_score, forward.weights
        spans = {
            "q": abs(tau) * (d_s.abs() @ key),
            "k": abs(tau) * (d_s.abs().mT @ forward.query.abs()),
            "v": p.mT @ graph.d_context.abs(),
        }
        of_query_heads = {"k": tau * d_s.mT @ forward.query, "v": p.mT @ graph.d_context}
        for role, span in spans.items():
            if role == "q":
                self._stored_head("d_q", heads["q"], span, self.n_query)
            elif repeats == 1:
                self._stored_head(f"d_{role}", heads[role], span, self.n_key)
            else:
                part = of_query_heads[role]
                self._stored_head(f"d_{role} of heads", part, span, self.n_key)
                self._stored(f"d_{role}", heads[role], repeats, graph.grouped(part.abs()))

    def _stored_head(self, name: str, x: Tensor, span: Tensor, terms: Tensor) -> None:
        """Note that dQ, dK or dV of a head is stored, with partial sums, and what accumulates."""
        pieces = PARTS + 1 + 2 * (self.rounding.ranks - 1)
        self._stored(name, x, pieces, span)
        self.places[name].own += self.units.gammas(terms + 5) * span

    def _gradients(self, heads: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        """Note what is stored of the gradients: parts of each head and input, or of each item."""
        problem, config = self.problem, self.problem.config
        if not config.projected:
            return
        for name, roles in shared_roles(problem).items():
            source, pieces = wide_of(problem, name), 0
            size = span = torch.zeros_like(exact[name])
            for role in roles:
                head, weight = heads[role][:, :, : source.shape[1]], wide_of(problem, f"w_{role}")
                each = weight.unflatten(0, (head.shape[1], -1))
                span = span + (head @ each).abs().sum(1)
                size = size + (head.abs() @ each.abs()).sum(1)
                pieces += head.shape[1]
                repeats = 1 if role == "q" else config.n_heads // config.kv_heads
                flat, of_weight = side_by_side(head), exact[f"w_{role}"]
                self._weight(f"w_{role}", flat, source, of_weight, repeats)
            self._stored(f"gradient of {name}", exact[name], 2 * pieces, span)
            terms = len(roles) * (max(config.inner_width, config.context_width) + config.n_heads)
            self._accumulated(f"gradient of {name}", terms, size)
        self._weight("w_o", self.upstream, side_by_side(self.forward.context), exact["w_o"], 1)

    def _weight(self, name: str, d_y: Tensor, x: Tensor, exact: Tensor, repeats: int) -> None:
        """Note what is stored of the gradient of a weight, dy^T x.

        That is parts of each item, and of chunks of its rows.
        """
        span, size = (d_y.mT @ x).abs().sum(0), (d_y.abs().mT @ x.abs()).sum(0)
        items = len(d_y) * repeats * self.rounding.ranks
        self._stored(f"gradient of {name}", exact, 2 * items, span)
        self._accumulated(f"gradient of {name}", d_y.shape[0] * d_y.shape[1] + items, size)

    def _accumulated(self, name: str, terms: int, size: Tensor) -> None:
        """Note the error of a sum of so many terms; size: the sum of their magnitudes."""
        self.places[name].own += self.units.gamma(terms) * size + terms * self.units.flush


def shared_roles(problem: Problem) -> dict[str, str]:
    """Return, for the name of each input, the roles of the tensor, such as "kv" for a memory."""
    shared: dict[str, str] = {}
    for name, tensor in problem.distinct().items():
        shared[name] = "".join(other[0] for other in INPUTS if getattr(problem, other) is tensor)
    return shared


def wide_of(problem: Problem, name: str) -> Tensor:
    """Return an input or a weight in float64."""
    x: Tensor = getattr(problem if name in INPUTS else problem.weights, name)
    return x.detach().double()


def _summed(d_y: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x, (m, n), for dy (B, length, m) and x (B, length, n)."""
    summed: Tensor = d_y.flatten(0, 1).mT @ x.flatten(0, 1)
    return summed
