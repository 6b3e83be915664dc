"""Pure edits of a problem: other weights, other keys, another mask, one item, an extra."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.variants import as_variant
from mha.spec import Claims, Config, MaskConvention, Problem, Weights, join_causal, to_convention
from mha.spec.claims import Alignment
from mha.spec.dtypes import computable


def passing_heads(problem: Problem) -> Problem:
    """Set W_o to the identity and b_o to zero, so that the output is the heads' contexts.

    With heads of their own width (`Config.d_head`), it is cut to d_model columns, or filled up with
    zeros.
    """
    w_o, b_o = problem.weights.of("o")
    eye = torch.eye(*w_o.shape, dtype=problem.query.dtype, device=problem.query.device)
    return problem.change(w_o=eye, b_o=None if b_o is None else torch.zeros_like(b_o))


def zeroed(problem: Problem, *names: str) -> Problem:
    """Set the weights of these names to zero; names that it does not have are ignored."""
    zeros = dict[str, Tensor]()
    for name, tensor in problem.weights.named():
        if name in names:
            zeros[name] = (computable(tensor) * 0).to(tensor.dtype)
    return problem.change(**zeros)


def with_weights_as_output(case: Case, claims: Claims) -> Problem:
    """Return a problem of the case whose output shows the weights: see `weights_in`.

    d_k is S, or more.
    """
    width = max(case.head_dim, case.S, case.L if case.inputs == "self" else 1)
    return showing_weights(with_width(case, claims, width).problem())


def with_width(case: Case, claims: Claims, width: int) -> Case:
    """Return the case with heads of at least this width, a claimed one if any is as large."""
    return replace(case, head_dim=max(width, claims.sizes.fit_head_dim(width)))


def showing_weights(problem: Problem, copies: int = 1) -> Problem:
    """Change a problem so that the first columns of each head's output are its weights.

    Each value is one-hot, and so are query and key where they are the same tensor.

    problem: with d_k of copies * S, or more.
    copies: how many times the weights are there, side by side.
    """
    batch, length, width = problem.value.shape
    eye = torch.eye(length, width, dtype=problem.query.dtype, device=problem.query.device)
    one_hot = eye.expand(batch, -1, -1).contiguous()
    problem = problem.map_inputs(lambda x: one_hot if x is problem.value else x)
    spare = problem.config.head_dim - copies * length
    of_a_head = torch.nn.functional.pad(eye.repeat(copies, 1), (0, 0, 0, spare))
    w_v = of_a_head.repeat(problem.config.kv_heads, 1)
    return zeroed(passing_heads(problem), "b_v").change(w_v=w_v)


def weights_in(output: Tensor, problem: Problem) -> Tensor:
    """Return the weights (B, H, L, S) that the output (B, L, D) of `showing_weights` has."""
    _, heads, _, keys = problem.shape
    parts: Tensor = output.unflatten(-1, (heads, problem.config.head_dim)).transpose(1, 2)
    return parts[..., :keys]


def select_keys(problem: Problem, keys: Tensor) -> Problem:
    """Select keys and values by index, in the order given.

    The queries of self-attention change with them. The mask stays as it is.
    """
    selected = {id(problem.key), id(problem.value)}
    if problem.square:
        selected.add(id(problem.query))
    return problem.map_inputs(lambda x: x[:, keys] if id(x) in selected else x)


def select_queries(problem: Problem, rows: Tensor, alignment: Alignment | None) -> Problem:
    """Select queries by index, with their rows of the masks, the causal one included.

    They keep their positions. For a few queries, memory is linear in the number of keys.
    """
    queries, keys = problem.query.shape[1], problem.key.shape[1]
    mask = problem.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if problem.is_causal:
        offset = keys - queries if alignment == "bottom_right" else 0
        positions = (rows + offset).to(problem.query.device).unsqueeze(1)
        mask = join_causal(mask, torch.arange(keys, device=problem.query.device) <= positions)
    places = rows.to(problem.query.device)
    return problem.change(query=problem.query[:, rows], mask=mask, is_causal=False, places=places)


def as_claimed(claims: Claims, problem: Problem, allowed: Tensor) -> Problem:
    """Return the problem with a boolean mask, converted to a form that is claimed."""
    form: MaskConvention = "keep" if "bool" in claims.masks else "additive"
    return problem.change(mask=to_convention(allowed, form, problem.query.dtype))


def as_wide_as_claimed(mask: Tensor, problem: Problem, claims: Claims) -> Tensor:
    """Expand a mask (B or 1, H or 1, L or 1, S) along the axes along which masks may differ."""
    differs = claims.per_item_mask, claims.per_head_mask, claims.per_query_mask, True
    sizes = zip(problem.shape, differs, strict=True)
    return mask.expand(*(size if claimed else -1 for size, claimed in sizes))


def item(problem: Problem, index: int) -> Problem:
    """Take one item of the batch, as a batch of one."""
    own = slice(index, index + 1)
    mask = problem.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[own]
    return problem.map_inputs(lambda x: x[own]).change(mask=mask)


def with_dropout(problem: Problem, probability: float) -> Problem:
    """Return the problem with another dropout probability."""
    return problem.change(config=replace(problem.config, dropout=probability))


def extra_keys(claims: Claims) -> list[str]:
    """Return the claimed extras that add a key."""
    return sorted({"bias_kv", "zero_key"} & set(claims.extras))


def with_extra(problem: Problem, case: Case, extra: str) -> Problem:
    """Return the problem with one of `mha.spec.claims.EXTRAS` added.

    For "unbatched", it is a batch of one item.
    """
    if extra == "unbatched":
        return item(problem, 0)
    config = replace(problem.config, **{extra: True})  # type: ignore[arg-type]  # a field of this type
    weights = problem.weights
    if extra == "bias_kv":
        drawn = _weights_of(case, config, problem.query.dtype)
        weights = replace(weights, extra_k=drawn.extra_k, extra_v=drawn.extra_v)
    return problem.change(config=config, weights=weights)


def _weights_of(case: Case, config: Config, dtype: torch.dtype) -> Weights:
    """Return the weights that a case has with another configuration."""
    seed = int(torch.randint(2**31, (1,), generator=case.generator))  # as in `make_inputs`
    return Weights.random(config, seed).to(dtype, case.device)


def with_config(case: Case, config: Config) -> Problem:
    """Return the case's problem with another configuration.

    It has weights of its own, and inputs of the widths it needs. Inputs that are one tensor stay
    one tensor if they have one width.
    """
    if not case.projected:
        projected = with_config(replace(case, projected=True), _of_projections(config))
        return case.without_projections(projected)
    problem = case.problem()
    weights = _weights_of(case, config, problem.query.dtype)
    generator, made = case.generator, dict[tuple[int, int], Tensor]()

    def fitted(x: Tensor, width: int) -> Tensor:
        if x.shape[-1] == width:
            return x
        if (id(x), width) not in made:
            made[id(x), width] = torch.randn(*x.shape[:2], width, generator=generator).to(x)
        return made[id(x), width]

    query, key = fitted(problem.query, config.d_model), fitted(problem.key, config.key_width)
    value = fitted(problem.value, config.value_width)
    return problem.change(config=config, weights=weights, query=query, key=key, value=value)


def _of_projections(config: Config) -> Config:
    """Return a configuration with projections that gives a kernel's inputs, for one without."""
    return replace(config, projected=True, kdim=None, vdim=None)


def with_other_options(case: Case, claims: Claims) -> Config:
    """Return a case's configuration with one or more of the other claimed options, by its seed.

    They are kdim and vdim, heads of their own width, and extra keys. The configuration itself if
    none is claimed.
    """
    config = case.config
    options: list[dict[str, object]] = [{extra: True} for extra in extra_keys(claims)]
    if claims.kv_widths and case.variant != "other_widths":
        kdim = config.d_model + 1
        options.append({"kdim": kdim, "vdim": kdim if case.inputs == "memory" else 3})
    if claims.own_head_dim:
        own = as_variant(case, "own_width", claims)
        options.append({"d_model": own.d_model, "d_head": own.head_dim})
    # The bits of a number from 1 say which options are chosen.
    chosen = case.seed % max(1, 2 ** len(options) - 1) + 1
    for place, option in enumerate(options):
        if chosen >> place & 1:
            config = replace(config, **option)  # type: ignore[arg-type]  # each has the type of its field
    return config
