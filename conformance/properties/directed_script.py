"""A directed failure as lines of a script: the exact output, and how much the error has of what a defect would do.

The formulas are those of `directed`, for q, k, v (B, H, N, d_k), scores s, weights p, contexts o and the boolean
`allowed`. Each sets `change`, of the contexts, or `direction`, of the output.
"""

from __future__ import annotations

from mha.conformance.harness.recording import CallStep
from mha.spec import Claims, Problem
from mha.spec.problem import INPUTS

SCALE = ("change = (p * (s - (p * s).sum(-1, keepdim=True))) @ v",)
VALUE = ("change = v.mean((0, 2), keepdim=True).expand_as(o)",)
MEAN = ("change = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).double() @ v - o",)
LAST_KEY = (
    "last = allowed & (allowed.cumsum(-1) == allowed.sum(-1, keepdim=True)) & (allowed.sum(-1, keepdim=True) > 1)",
    "lost = (p * last).sum(-1, keepdim=True)",
    "change = -lost / (1 - lost) * (last.double() @ v - o)",
)
MASKED_KEY = (
    "first = ~allowed & ((~allowed).cumsum(-1) == 1)",
    "read = ((s - s.masked_fill(~allowed, -inf).logsumexp(-1, keepdim=True)).exp() * first).nan_to_num(0.0, 0.0)",
    "read = read.sum(-1, keepdim=True)",
    "change = read / (1 + read) * (first.double() @ v - o)",
)


def random_formula(seed: int) -> tuple[str, ...]:
    """Return the direction of an output of random signs, with the seed of the case."""
    return (
        f"signs = torch.randint(0, 2, exact.shape, generator=torch.Generator().manual_seed({seed})) * 2 - 1",
        "direction = signs * exact.abs().mean()",
    )


def assertion_of(call: CallStep, claims: Claims, formula: tuple[str, ...], text: str, explained: float) -> list[str]:
    """Return the lines that fail as a call did; none where the exact output takes more than those of `_exact`.

    text: what the output is as if, with {} for how much. explained: the share that rounding explains.
    """
    config = call.problem.config
    if not formula or config.extra_keys or config.kv_heads != config.n_heads:
        return []
    number = call.number
    return [
        "",
        *_exact(call, claims),
        "",
        "# What the defect would do to the output, and how much of that the error has.",
        *formula,
        *(["direction = join(change)"] if formula[-1].startswith("change") else []),
        "rows = allowed.any(-1).all(1).unsqueeze(-1)  # that have keys",
        "direction = direction * rows",
        f"share = ((output_{number}.detach().double() - exact) * direction).sum() / direction.square().sum()",
        f"as_if = {text!r}.format(f'{{share.abs():.2%}}')",
        f"assert share.abs() <= {explained:.4g}, "
        f'f"output_{number} is as if {{as_if}}; rounding explains {percent(explained)} at most"',
    ]


def _exact(call: CallStep, claims: Claims) -> list[str]:
    """Return the lines that compute a call in float64, up to the exact output."""
    problem, number, build = call.problem, call.number, call.build
    config, shape = problem.config, tuple(problem.shape)
    lines = ["# The same call in float64."]
    for role, name in zip("qkv", INPUTS, strict=True):
        x = f"{_name_of(problem, name)}_{number}.double() @ w_{role}_{build}.double().T{_bias(problem, role, build)}"
        lines.append(f"{role} = ({x}).unflatten(-1, ({config.n_heads}, -1)).transpose(1, 2)")
    lines.append(f"s = {claims.scale_for(config.head_dim)!r} * q @ k.mT")
    lines.append(f"allowed = torch.ones({shape}, dtype=torch.bool)")
    masked = "s"
    if problem.mask is not None and problem.mask.is_floating_point():
        lines.append(f"allowed = allowed & (mask_{number} != -inf)")
        masked = f"(s + mask_{number}.double())"
    elif problem.mask is not None:
        lines.append(f"allowed = allowed & mask_{number}")
    if problem.is_causal:
        lines.append(f"allowed = allowed.tril({shape[3] - shape[2] if claims.causal == 'bottom_right' else 0})")
    return [
        *lines,
        f"p = {masked}.masked_fill(~allowed, -inf).softmax(-1).nan_to_num(0.0)",
        "o = p @ v",
        f"join = lambda contexts: contexts.transpose(1, 2).flatten(2) @ w_o_{build}.double().T",
        f"exact = join(o){_bias(problem, 'o', build)}",
    ]


def _name_of(problem: Problem, name: str) -> str:
    """Return the first input that is the same tensor, which a script names once."""
    given = getattr(problem, name)
    return next(first for first in INPUTS if getattr(problem, first) is given)


def _bias(problem: Problem, role: str, build: int) -> str:
    return "" if getattr(problem.weights, f"b_{role}") is None else f" + b_{role}_{build}.double()"


def percent(share: float) -> str:
    """Return a share in percent, with two digits after the point if it is small."""
    return f"{100 * share:.2f}%" if abs(share) < 0.1 else f"{100 * share:.3g}%"
