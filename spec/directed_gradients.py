"""Directed tests of gradients: how far rounding may move them along one direction.

The test is that of `mha.spec.directed`, of <w, dX - dX*>, where w has a part for each gradient that
is looked at. With a_X = d<w, .> / dX for dQ, dK, dV and g_c for the contexts, the projection is,
for each row of weights P, a mean and a covariance under them,

    sum_j P_j m_j + sum_j P_j h_j (dP_j - D),
    h = tau (a_Q K^T + Q a_K^T),    m = dC a_V^T + g_c V^T

from which all g_k follow. The other symbols are those of `mha.spec.gradient_graph`.

Forms that are equal on paper, each with its own roundings:

- P has three uses, in dV, dS and D. A stored P may serve all of them, or be recomputed and cast for
  one of them; the sum of its row may be of the stored numbers, or not. Queries and keys have two
  uses, in the scores and in dK and dQ.
- The rows of dS sum to 0, so that h counts up to a number for each row: keys without their bias
  shift it, and so does a maximum of the row that is differentiated.

Sources: those of `mha.spec.directed`; Dao et al. 2022, appendix B, for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mha.spec.directed import Allowance, explained, largest_deviation
from mha.spec.gradient_graph import GradientGraph, shared_roles, wide_of
from mha.spec.rounding_graph import Uses


def projection_of_gradients(
    graph: GradientGraph, found: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> float:
    """Return <w, dX - dX*>.

    found: gradients dX, by name.
    direction: w, by name.
    """
    total = 0.0
    for name, w in direction.items():
        error = found[name].detach().double() - graph.exact[name]
        total += float((error * w.double()).sum())
    return total


def allowance_of_gradients(graph: GradientGraph, direction: Mapping[str, Tensor]) -> Allowance:
    """Return what rounding may do to the gradients along a direction.

    direction: w, a part for each name.

    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> from mha.spec.gradient_graph import gradient_graph
    >>> config = Config(d_model=8, n_heads=2)
    >>> x = torch.linspace(-2, 2, 80).reshape(2, 5, 8).bfloat16()
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x.clone(), x.clone())
    >>> graph = gradient_graph(problem, Claims(), x)
    >>> direction = {"value": graph.exact["value"]}
    >>> allowance_of_gradients(graph, direction).is_informative
    True
    >>> projection_of_gradients(graph, graph.exact, direction)
    0.0
    """
    adjoint, forward = Adjoint.of(graph, direction), graph.forward
    # A scale is one number: its error moves all scores at once, and dQ and dK.
    of_scores = abs(float((adjoint.g_s * forward.scores).sum()))
    of_heads = sum(abs(float((adjoint.a[role] * graph.heads[role]).sum())) for role in "qk")
    return explained(
        graph.places,
        adjoint.gradients(),
        size=sum(float(w.double().square().sum()) for w in direction.values()),
        store=forward.store,
        of_scale=forward.tau_error * (of_scores + of_heads),
        second_order=adjoint.second_order(),
        deviation=largest_deviation(forward.variance),
    )


def allowances_of_gradients(
    graph: GradientGraph, directions: Iterable[Mapping[str, Tensor]]
) -> list[Allowance]:
    """Return `allowance_of_gradients` for each direction, in float32; see `mha.spec.directed`."""
    narrow = graph.narrowed()
    return [allowance_of_gradients(narrow, direction) for direction in directions]


@dataclass(frozen=True, slots=True, eq=False)
class Adjoint:
    """d<w, .> / dx for all numbers x of a graph; the symbols are those of the module.

    a: a_Q, a_K, a_V by role, for the key/value heads, and g_c under "o".
    a_k, a_v: for the query heads.
    h: in each form, (B, H, L, S).
    m: (B, H, L, S).
    uses: d<w, .> / dP for each use of P, in each form of h.
    g_s: d<w, .> / ds.
    """

    graph: GradientGraph
    direction: Mapping[str, Tensor]
    a: Mapping[str, Tensor]
    a_k: Tensor
    a_v: Tensor
    h: tuple[Tensor, ...]
    m: Tensor
    uses: Uses
    g_s: Tensor

    @staticmethod
    def of(graph: GradientGraph, direction: Mapping[str, Tensor]) -> Adjoint:
        """Return the adjoint of a direction."""
        forward, p, a = graph.forward, graph.forward.weights, _arriving(graph, direction)
        repeats = p.shape[1] // forward.kv_heads
        a_k, a_v = (a[role].repeat_interleave(repeats, 1) for role in "kv")
        h = forward.tau * (a["q"] @ forward.key.mT + forward.query @ a_k.mT)
        shifts = _shifts(graph, a["q"], h)
        forms = tuple((h - shift).masked_fill(p == 0, 0.0) for shift in shifts)
        m = (graph.d_context @ a_v.mT + a["o"] @ forward.value.mT).masked_fill(p == 0, 0.0)
        d_p = graph.d_weight.masked_fill(p == 0, 0.0)
        # By P in dV: m;  in dS: h (dP - D);  in D: -dP sum_l P_l h_l
        in_scores = tuple(form * (d_p - graph.row_sum) for form in forms)
        in_sums = tuple(-d_p * _mean(form, p) for form in forms)
        return Adjoint(
            graph=graph,
            direction=direction,
            a=a,
            a_k=a_k,
            a_v=a_v,
            h=forms,
            m=m,
            uses=((m,), in_scores, in_sums),
            g_s=p * _centred(m + in_scores[0] + in_sums[0], p),
        )

    def gradients(self) -> dict[str, Uses]:
        """Return d<w, .> / dx for the numbers x of each place, by name."""
        found = self._of_forward() | self._of_backward()
        for name, exact in self.graph.exact.items():
            w = self.direction.get(name, torch.zeros_like(exact))
            found[f"gradient of {name}"] = ((w.to(self.m),),)
        return found

    def _of_forward(self) -> dict[str, Uses]:
        """Return the same for the places of the forward pass."""
        graph, forward = self.graph, self.graph.forward
        p, tau, d_s, g_s, a = forward.weights, forward.tau, graph.d_score, self.g_s, self.a
        weights, sums = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
        for use in self.uses:
            # A stored weight counts as it is, or, where the sum of the row is of the stored ones,
            # from the mean on.
            counted = [(g, _centred(g, p)) for g in use]
            weights.append(tuple(chain.from_iterable(counted)))
            sums.append(tuple(_mean(g, p) for g in use))
        of_weights = tuple(weights)  # one object: see `explained`
        of_value = (p * _centred(self.h[0], p)).mT @ graph.d_context + p.mT @ a["o"]
        in_d = tuple(-_mean(form, p) * graph.d_context for form in self.h)
        # For queries and keys: in the scores, and in dK and dQ
        return {
            "query": ((tau * g_s @ forward.key,), (tau * d_s @ self.a_k,)),
            "key": (
                (graph.grouped(tau * g_s.mT @ forward.query),),
                (graph.grouped(tau * d_s.mT @ a["q"]),),
            ),
            "value": ((graph.grouped(of_value),),),
            "score": ((g_s, *self._of_recomputed_scores()),),
            "exponential": of_weights,
            "sum": tuple(sums),
            "weight": of_weights,
            "recomputed": of_weights,
            "context": (in_d, (a["o"],)),
        }

    def _of_recomputed_scores(self) -> list[Tensor]:
        """Return d<w, .> / ds where a row is recomputed with the sum of another one, in each form.

        Scores are the same for all uses otherwise, and their row is normalised.
        """
        p, (of_values, in_scores, in_sums) = self.graph.forward.weights, self.uses
        (m,) = of_values
        both = zip(in_scores, in_sums, strict=True)
        return [p * (m + score + row_sum) for score, row_sum in both]

    def _of_backward(self) -> dict[str, Uses]:
        """Return the same for the places of the backward pass."""
        graph, p = self.graph, self.graph.forward.weights
        of_sum = [-_mean(form, p) for form in self.h]
        in_difference = tuple(p * form for form in self.h)
        in_sum = tuple(g * p for g in of_sum)
        in_product = tuple(g.expand_as(graph.d_context) for g in of_sum)
        return {
            "d_context": ((p @ self.a_v + (p * _centred(self.h[0], p)) @ graph.forward.value,),),
            "d_weight": (in_difference, in_sum),
            "product": (in_product,),
            "row_sum": (tuple(of_sum),),
            "d_score": (self.h,),
            "d_q": ((self.a["q"],),),
            "d_k": ((self.a["k"],),),
            "d_v": ((self.a["v"],),),
            "d_k of heads": ((self.a_k,),),
            "d_v of heads": ((self.a_v,),),
        }

    def second_order(self) -> float:
        """Return a bound on the mean of the second order.

        That is sum_j W_j^2 times half of the second derivatives, and more. Of a mean, d2/ds_j^2 is
        P_j (1 - 2 P_j) (m_j - m); of a covariance, it is at most P_j (3 |h_j - h| |dP_j - D| +
        |Cov|), and 2 P_j sd(h) sd(dP) more where the errors of the scores of a row come from one
        query. Queries and keys enter scores and products.
        """
        graph, forward = self.graph, self.graph.forward
        p, d_s = forward.weights, graph.d_score
        h, difference = _centred(self.h[0], p), graph.d_weight - graph.row_sum
        covariance = (d_s * self.h[0]).sum(-1, keepdim=True).abs()
        spread = (_mean(h.square(), p) * _mean(difference.square(), p)).sqrt()
        curved = _centred(self.m, p).abs() + 2 * (h * difference).abs() + covariance + 2 * spread
        total = float((p * forward.variance * curved).sum())
        # A weight that is stored has a part in P and in D.
        if "weight" in graph.places:
            total += 4 * forward.store**2 * float((p.square() * (h * graph.d_weight).abs()).sum())
        scale = (forward.store * forward.tau) ** 2
        of_query = scale * torch.as_tensor(graph.places["query"].square)
        moved = d_s @ (self.a_k * forward.key) - (p @ forward.key) * (d_s @ self.a_k)
        moved = moved - (d_s @ forward.key) * (p @ self.a_k)
        total += float((of_query * moved.abs()).sum())
        of_key = scale * torch.as_tensor(graph.places["key"].square)
        moved = (d_s * (1 - 2 * p)).mT @ (self.a["q"] * forward.query)
        return total + float((of_key * graph.grouped(moved.abs())).sum())


def _shifts(graph: GradientGraph, a_q: Tensor, h: Tensor) -> list[Tensor]:
    """Return what may be subtracted from the rows of h, each (B, H, L, 1)."""
    forward, shifts = graph.forward, [torch.zeros_like(h[..., :1])]
    bias = graph.problem.weights.b_k
    if bias is not None:
        repeats = h.shape[1] // forward.kv_heads
        rows = bias.detach().to(h).unflatten(0, (forward.kv_heads, 1, -1))
        of_keys = a_q * rows.repeat_interleave(repeats, 0)
        shifts.append(forward.tau * of_keys.sum(-1, keepdim=True))
    if graph.differentiates_maximum and h.shape[-1]:
        shifts.append(h.gather(-1, forward.weights.argmax(-1, keepdim=True)))
    return shifts


def _arriving(graph: GradientGraph, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return d<w, .> / dX for X = dQ, dK, dV by role, and g_c under "o".

    Each is (B, heads, length, d_k), for the key/value heads.
    """
    problem = graph.problem
    found = {role: torch.zeros_like(like) for role, like in graph.heads.items()}
    for name, roles in shared_roles(problem).items():
        for role in roles:
            parts = []
            if name in direction:  # <w, dX W> = <w W^T, dX>
                parts.append(direction[name].double() @ wide_of(problem, f"w_{role}").T)
            if f"w_{role}" in direction:  # <w, dX^T x> = <x w^T, dX>
                parts.append(wide_of(problem, name) @ direction[f"w_{role}"].double().T)
            for part in parts:  # extra keys have none
                split = part.unflatten(-1, (-1, problem.config.width_of(role))).transpose(1, 2)
                found[role][:, :, : split.shape[2]] += split
    found["o"] = torch.zeros_like(graph.forward.context)
    if "w_o" in direction:
        given = graph.upstream @ direction["w_o"].to(graph.upstream)
        found["o"] = given.unflatten(-1, (problem.config.n_heads, -1)).transpose(1, 2)
    return found


def _mean(x: Tensor, p: Tensor) -> Tensor:
    """Return the mean of each row under its weights, (B, H, L, 1)."""
    return (p * x).sum(-1, keepdim=True)


def _centred(x: Tensor, p: Tensor) -> Tensor:
    """Return x less its mean under the weights of each row, 0 where these are 0."""
    return (x - _mean(x, p)).masked_fill(p == 0, 0.0)
