"""A directed failure as a script: the exact result, and the share of a defect in the error.

The formulas are those of `directed` and `directed_gradients`, for q, k, v (B, H, N, d_k), scores s,
weights p, contexts o, the boolean `allowed`, and d_o, d_p, d, d_s of the backward pass. One of an
output sets `change`, of the contexts, or `direction`; one of gradients sets of_q, of_k and of_v,
what q, k and v get, or `direction`, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mha.conformance.harness.recording import CallStep
from mha.spec import Claims, Config, Problem
from mha.spec.problem import INPUTS

SCALE = ("change = (p * (s - (p * s).sum(-1, keepdim=True))) @ v",)
MASK = (
    "added = (p.log() - s).masked_fill(p == 0, 0.0)",
    "change = (p * (added - (p * added).sum(-1, keepdim=True))) @ v",
)
VALUE = ("change = v.mean((0, 2), keepdim=True).expand_as(o)",)
MEAN = ("change = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).double() @ v - o",)
EPSILON = ("change = -p.amax(-1, keepdim=True) * o",)
LOST_KEY = (
    "lost = (p * key).sum(-1, keepdim=True) * (allowed.sum(-1, keepdim=True) > 1)",
    "change = -lost / (1 - lost) * (key.double() @ v - o)",
)
LAST_KEY = ("key = allowed & (allowed.cumsum(-1) == allowed.sum(-1, keepdim=True))", *LOST_KEY)
MASKED_KEY = (
    "first = ~allowed & ((~allowed).cumsum(-1) == 1)",
    (
        "read = ((s - s.masked_fill(~allowed, -inf).logsumexp(-1, keepdim=True)).exp() *"
        " first).nan_to_num(0.0, 0.0)"
    ),
    "read = read.sum(-1, keepdim=True)",
    "change = read / (1 + read) * (first.double() @ v - o)",
)
# From the changes of dS and of P, which dV has.
CORE = "of_q, of_k, of_v = scale * of_s @ k, scale * of_s.mT @ q, of_p.mT @ d_o"
D_SCORE = ("of_s, of_p = d_s, torch.zeros_like(p)", CORE)
BACKWARD_SCALE = (
    "change = p * (s - (p * s).sum(-1, keepdim=True))",
    "of_s, of_p = change * (d_p - d) - p * (change * d_p).sum(-1, keepdim=True), change",
    CORE,
)
ROW_SUM = ("of_s, of_p = p * d, torch.zeros_like(p)", CORE)
LOST_GRADIENT = (
    "last = allowed & (allowed.cumsum(-1) == allowed.sum(-1, keepdim=True))",
    "of_s, of_p = -d_s * last, -p * last",
    CORE,
)
LAST_KEY_GRADIENT = (*LOST_GRADIENT, "of_q = torch.zeros_like(q)")
LAST_KEY_OF_QUERIES = (*LOST_GRADIENT, "of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)")
MASKED_KEY_GRADIENT = (*MASKED_KEY[:2], "of_s, of_p = read * (d_p - d), read", CORE)

MOVED = "torch.autograd.grad((q, k, v), leaves, (of_q, of_k, of_v), materialize_grads=True)"


def late_key_formula(key: int) -> tuple[str, ...]:
    """Return the direction of a key that is lost, wherever it is allowed."""
    return (f"key = allowed & (torch.arange(allowed.shape[-1]) == {key})", *LOST_KEY)


def random_formula(seed: int) -> tuple[str, ...]:
    """Return the direction of an output of random signs, with the seed of the case."""
    return (f"direction = {_random_signs('exact', seed)}",)


def random_gradients(seed: int, names: Iterable[str]) -> tuple[str, ...]:
    """Return the direction of gradients of random signs, with the seed of the case."""
    return (
        f"direction = {{name: {_random_signs('exact[name]', seed)} for name in {tuple(names)!r}}}",
    )


def _random_signs(like: str, seed: int) -> str:
    signs = (
        f"torch.randint(0, 2, {like}.shape, generator=torch.Generator().manual_seed({seed})) *"
        " 2 - 1"
    )
    return f"({signs}) * {like}.abs().mean()"


def assertion_of(
    call: CallStep, output: int, claims: Claims, formula: Sequence[str], text: str, explained: float
) -> list[str]:
    """Return the lines that fail as an output did; none where there is no formula.

    call: the first one with its inputs.
    output: its number.
    text: what the output is as if, with {} for how much.
    explained: the share that rounding explains.
    """
    if not formula:
        return []
    return [
        "",
        "# The same call in float64.",
        *_exact(call, claims),
        "",
        "# What the defect would do to the output, and how much of that the error has.",
        *_direction_of(formula),
        "direction = direction * allowed.any(-1).all(1).unsqueeze(-1)  # in rows that have keys",
        (
            f"share = ((output_{output}.detach().double() - exact) * direction).sum() /"
            " direction.square().sum()"
        ),
        *_share(f"output_{output} is", text, explained),
    ]


def _direction_of(formula: Sequence[str]) -> list[str]:
    """Return the lines up to the direction of an output, for a formula of it or of contexts."""
    if formula[-1].startswith("change"):
        return [*formula, "direction = join(change)"]
    return [*formula]


def gradient_assertion_of(
    call: CallStep,
    claims: Claims,
    found: Mapping[str, str],
    formula: Sequence[str],
    text: str,
    explained: float,
) -> list[str]:
    """Return the lines that fail as the gradients of a call did; see `assertion_of`.

    found: the expression for each gradient, by the name of the input or the weight.
    """
    if not formula:
        return []
    numbers = {name: call.number if name in INPUTS else call.build for name in found}
    given = ", ".join(f"{name}_{number}" for name, number in numbers.items())
    codes = ", ".join(f"{name!r}: {code}" for name, code in found.items())
    n_heads = call.problem.config.n_heads
    return [
        f"found = {{{codes}}}",
        "",
        "# The same call in float64, and its gradients.",
        f"{given} = leaves = [x.detach().double().requires_grad_() for x in ({given})]",
        *_exact(call, claims),
        f"upstream = upstream_{call.number}.double()",
        "exact = dict(zip(found, torch.autograd.grad(exact, leaves, upstream, retain_graph=True)))",
        (
            f"d_o = (upstream @ w_o_{call.build}.double()).unflatten(-1, ({n_heads},"
            " -1)).transpose(1, 2)"
        ),
        "d_p = d_o @ v.mT",
        "d = (p * d_p).sum(-1, keepdim=True)",
        "d_s = p * (d_p - d)",
        "",
        "# What the defect would do to the gradients, and how much of that their errors have.",
        *_direction_of_gradients(formula),
        (
            "projected = sum(((found[name].double() - exact[name]) * w).sum() for name, w in"
            " direction.items())"
        ),
        "share = projected / sum(w.square().sum() for w in direction.values())",
        *_share("the gradients are", text, explained),
    ]


def _direction_of_gradients(formula: Sequence[str]) -> list[str]:
    """Return the lines up to the direction of gradients, for a formula of it or of q, k and v."""
    if formula[-1].startswith("direction"):
        return [*formula]
    return [*formula, f"moved = {MOVED}", "direction = dict(zip(found, moved))"]


def _share(code: str, text: str, explained: float) -> list[str]:
    """Return the lines that compare a share with what rounding explains.

    code: what was tested, as in "output_1 is".
    """
    return [
        f"as_if = {text!r}.format(f'{{share.abs():.2%}}')",
        f"assert share.abs() <= {explained:.4g}, "
        f'f"{code} as if {{as_if}}; rounding explains {percent(explained)} at most"',
    ]


def _exact(call: CallStep, claims: Claims) -> list[str]:
    """Return the lines that compute a call in float64, up to the exact output."""
    problem, number, build = call.problem, call.number, call.build
    config = problem.config
    lines = [f"scale = {claims.scale_for(config.head_dim)!r}"]
    for role, name in zip("qkv", INPUTS, strict=True):
        x = (
            f"{_name_of(problem, name)}_{number}.double() @"
            f" w_{role}_{build}.double().T{_bias(problem, role, build)}"
        )
        heads = config.n_heads if role == "q" else config.kv_heads
        lines.append(f"{role} = ({x}).unflatten(-1, ({heads}, -1)).transpose(1, 2)")
        if config.extra_keys and role != "q":
            lines += _with_extra_keys(config, role, build)
        if heads < config.n_heads:
            lines.append(f"{role} = {role}.repeat_interleave({config.n_heads // heads}, 1)")
    lines.append("s = scale * q @ k.mT")
    return [
        *lines,
        *_allowed(call, claims),
        "o = p @ v",
        f"join = lambda contexts: contexts.transpose(1, 2).flatten(2) @ w_o_{build}.double().T",
        f"exact = join(o){_bias(problem, 'o', build)}",
    ]


def _allowed(call: CallStep, claims: Claims) -> list[str]:
    """Return the lines from the scores to the weights; extra keys are allowed, and have no mask."""
    problem, number, extra = call.problem, call.number, call.problem.config.extra_keys
    shape, pad, masked = tuple(problem.shape), "torch.nn.functional.pad", "s"
    lines = [f"allowed = torch.ones({shape}, dtype=torch.bool)"]
    if problem.mask is not None and problem.mask.is_floating_point():
        lines.append(f"allowed = allowed & (mask_{number} != -inf)")
        bias = f"mask_{number}.double()"
        if extra:
            bias = f"{pad}({bias}.expand{shape}, (0, {extra}))"
        masked = f"(s + {bias})"
    elif problem.mask is not None:
        lines.append(f"allowed = allowed & mask_{number}")
    place = shape[3] - shape[2] if claims.alignment == "bottom_right" else 0
    if problem.is_causal:
        lines.append(f"allowed = allowed.tril({place})")
    left, right = problem.options.window or (None, None)
    if left is not None:
        lines.append(f"allowed = allowed.triu({place - left})")
    if right is not None:
        lines.append(f"allowed = allowed.tril({place + right})")
    if extra:
        lines.append(f"allowed = {pad}(allowed, (0, {extra}), value=True)")
    return [*lines, f"p = {masked}.masked_fill(~allowed, -inf).softmax(-1).nan_to_num(0.0)"]


def _with_extra_keys(config: Config, role: str, build: int) -> list[str]:
    """Return the lines that append the extra keys, or values, that a configuration has."""
    joined = [role]
    if config.bias_kv:
        by_heads = f"extra_{role}_{build}.double().unflatten(0, (-1, 1, {config.head_dim}))"
        joined.append(f"{by_heads}.expand_as({role}[:, :, :1])")
    if config.zero_key:
        joined.append(f"torch.zeros_like({role}[:, :, :1])")
    return [f"{role} = torch.cat(({', '.join(joined)}), 2)"]


def _name_of(problem: Problem, name: str) -> str:
    """Return the first input that is the same tensor, which a script names once."""
    given = getattr(problem, name)
    names = [each for each in INPUTS if getattr(problem, each) is given]
    return names[0]


def _bias(problem: Problem, role: str, build: int) -> str:
    """Return what adds the bias of a projection, or "" where there is none."""
    if getattr(problem.weights, f"b_{role}") is None:
        return ""
    return f" + b_{role}_{build}.double()"


def percent(share: float) -> str:
    """Return a share in percent, with two digits after the point if it is small."""
    if abs(share) < 0.1:
        return f"{100 * share:.2f}%"
    return f"{100 * share:.3g}%"
