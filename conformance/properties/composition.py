"""CMP, INC, GQA and XAT: what an attention may be combined with, and what else it may be built as."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT
from mha.conformance.expect import expect, expect_agree, expect_close, need
from mha.conformance.properties.gradients import BOUNDED
from mha.conformance.registry import checks
from mha.conformance.trial import Trial, guarded
from mha.spec import Config, Problem, Weights, oracle
from mha.spec.bounds import Ball

MASKS = ("none", "padding", "queries")
SMALL = Domain(masks=MASKS, causal=BOTH, regimes=MODERATE, layouts=DENSE, need_weights=(False,), max_length=17)
EVALUATED = replace(SMALL, paths=("eval",))
WRONGS = ("zeros", "mean", "noise")


@checks("CMP-1", replace(SMALL, paths=("eval", "train")), needs="composes:compile", after="HED-1", rejects=(), limit=1)
def compiled_agrees_with_eager(attention: Trial, case: Case) -> None:
    problem = case.problem()
    bound, base = attention.answer(problem).output, attention(problem).output
    # Without a C++ compiler the graph is still captured and differentiated, but not turned into code.
    backend = "inductor" if case.device != "cpu" or shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    torch.compiler.reset()
    code = f"torch.compile({{}}, backend={backend!r}, fullgraph=True)"
    compiled = attention.derive(
        attention.built(problem), lambda module: torch.compile(module, backend=backend, fullgraph=True), code
    )
    seen = attention(problem, via=compiled).output
    expect_agree(seen, base, bounds=(bound, bound), because=f"what it gives uncompiled (backend {backend!r})")


class _Positional(nn.Module):
    """An attention without options, as `torch.export` wants it."""

    def __init__(self, attention: Any, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = attention, is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output alone."""
        output: Tensor = self.attention(query, key, value, is_causal=self.is_causal).output
        return output


@checks(
    "CMP-2",
    replace(EVALUATED, masks=("none",), inputs=("cross",), min_B=2, min_L=2, min_S=2),
    needs="composes:export",
    after="HED-1",
    rejects=(),
    limit=1,
)
def exported_program_agrees(attention: Trial, case: Case) -> None:
    problem = case.problem()
    B, L, S = (torch.export.Dim(name, min=1, max=1 << 12) for name in ("B", "L", "S"))
    inputs = problem.query, problem.key, problem.value
    wrapped = attention.derive(
        attention.built(problem),
        lambda module: torch.export.export(
            _Positional(module.eval(), problem.is_causal),
            inputs,
            dynamic_shapes=({0: B, 1: L}, {0: B, 1: S}, {0: B, 1: S}),
        ),
        "{}  # exported by torch.export.export with dynamic B, L and S",
    )
    program: Any = wrapped.attention
    longer = replace(case, B=case.B + 1, L=case.L + 2, S=case.S + 3).problem().change(weights=problem.weights)
    for each in (problem, longer):
        with guarded("the exported program"):
            result = program.module()(each.query, each.key, each.value)
        seen = attention.seen(result, "exported")
        because = f"what the exported program should give for (B, L, S) = {(*each.query.shape[:2], each.key.shape[1])}"
        expect_close(seen, attention.answer(each).output, because=because)


@checks("CMP-3", replace(EVALUATED, dtypes=BOUNDED), needs="composes:func", after="HED-1", limit=12)
def functional_transforms_agree(attention: Trial, case: Case) -> None:
    problem = case.problem()
    module = attention.built(problem).attention
    need(isinstance(module, nn.Module), "the attention is no torch.nn.Module")
    assert isinstance(module, nn.Module)
    module.eval()
    held = {name: parameter.detach() for name, parameter in module.named_parameters()}
    options = {"mask": problem.mask, "is_causal": problem.is_causal}

    def call(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        key, value = (query if x is problem.query else x for x in (problem.key, problem.value))
        result = torch.func.functional_call(module, parameters, (query, key, value), options)
        output: Tensor = result.output
        return output

    answer, upstream = attention.answer(problem).output, attention.upstream(problem)
    with guarded("torch.func"):
        plain = call(held, problem.query)
        many = torch.func.vmap(call, in_dims=(0, None))(
            {n: torch.stack([p, p]) for n, p in held.items()}, problem.query
        )
        slope = torch.func.grad(lambda query: (call(held, query) * upstream).sum())(problem.query)
    expect_close(attention.seen(plain, "functional"), answer, because="the oracle's value, by functional_call")
    for index in range(2):
        expect_close(attention.seen(many[index], f"many[{index}]"), answer, because="the oracle's value, under vmap")
    right = attention.right_gradients(problem, upstream)["query"]
    expect_close(attention.seen(slope, "slope"), right, because="the gradient, by torch.func.grad")


@checks(
    "CMP-4",
    replace(EVALUATED, dtypes=("float32",)),
    needs="composes:autocast",
    after="HED-1",
    rejects=WRONGS,
    floor=0.3,
)
def autocast_is_within_the_low_precision_bound(attention: Trial, case: Case) -> None:
    problem = case.problem()
    low = torch.bfloat16
    # What autocast does: inputs and weights are rounded to bfloat16 before each product.
    inputs = problem.map_inputs(lambda x: x.to(low)).change(weights=problem.weights.to(low, case.device))
    if problem.mask is not None and problem.mask.is_floating_point():
        inputs = inputs.change(mask=problem.mask.to(low))
    answer = oracle(inputs, attention.claims).output
    seen = attention(problem, path="autocast", dtype=low).output
    expect_close(seen, answer, because="the oracle's value in bfloat16")


@checks("INC-1", replace(EVALUATED, masks=("none",), square=True, causal=(True,)), needs="decodes", after="HED-1")
def decoding_equals_one_causal_pass(attention: Trial, case: Case) -> None:
    problem = case.problem()
    decoder: Any = attention.built(problem).attention
    decoder.eval()
    expected, cache, outputs = attention.answer(problem).output, None, []
    with torch.no_grad():
        for place in range(case.L):
            now = slice(place, place + 1)
            with guarded("decode"):
                output, cache = decoder.decode(problem.query[:, now], problem.key[:, now], problem.value[:, now], cache)
            outputs.append(output)
    shapes = {tuple(output.shape) for output in outputs}
    wanted = {(case.B, 1, case.config.d_model)}
    expect(shapes == wanted, f"decode gives the shapes {shapes}, but should give {wanted}")
    seen = attention.seen(torch.cat(outputs, 1), "decoded")
    expect_close(seen, expected, because="one causal pass over all positions")


def _rebuilt(case: Case, config: Config) -> Problem:
    """The case's problem with another configuration: weights of its own, and inputs as wide as it wants."""
    problem = case.problem()
    weights = Weights.random(config, case.seed).to(problem.query.dtype, case.device)
    generator = case.generator

    def wide(x: Tensor, width: int) -> Tensor:
        return x if x.shape[-1] == width else torch.randn(*x.shape[:2], width, generator=generator).to(x)

    key = wide(problem.key, config.key_width)
    value = (
        key if problem.value is problem.key and config.kdim == config.vdim else wide(problem.value, config.value_width)
    )
    return problem.change(config=config, weights=weights, key=key, value=value)


VARIANT = Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, regimes=MODERATE, layouts=DENSE)


@checks("GQA-1", replace(VARIANT, min_heads=2), needs="grouped_query", after="HED-1", rejects=WRONGS, floor=0.3)
def grouped_heads_equal_repeated_ones(attention: Trial, case: Case) -> None:
    groups = [count for count in range(1, case.n_heads) if case.n_heads % count == 0]
    config = replace(case.config, n_kv_heads=groups[case.seed % len(groups)])
    problem = _rebuilt(case, config)
    seen, answer = attention(problem), attention.answer(problem)
    because = f"{config.n_heads} heads on {config.n_kv_heads} key/value heads, each of which serves neighbours"
    expect_close(seen.output, answer.output, because=because)
    repeats, given = config.n_heads // config.kv_heads, problem.weights

    def repeated(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(0, (config.kv_heads, config.head_dim))
        return heads.repeat_interleave(repeats, 0).flatten(0, 1)

    spread = {name: repeated(tensor) for name, tensor in given.named() if name in ("w_k", "w_v", "b_k", "b_v")}
    same = attention(problem.change(config=case.config, **spread)).output
    expect_agree(seen.output, same, bounds=(answer.output, answer.output), because="each key/value head repeated")


@checks("XAT-1", replace(VARIANT, inputs=("cross",)), needs="kv_widths", after="HED-1", rejects=WRONGS, floor=0.3)
def other_widths_match_the_oracle(attention: Trial, case: Case) -> None:
    kdim, vdim = 1 + case.seed % 7, 1 + case.seed // 7 % 7
    problem = _rebuilt(case, replace(case.config, kdim=kdim, vdim=vdim))
    seen: Ball = attention.answer(problem).output
    because = f"the oracle's value with kdim = {kdim} and vdim = {vdim}"
    expect_close(attention(problem).output, seen, because=because)


@checks(
    "XAT-1",
    replace(VARIANT, inputs=("cross",), paths=WITH_GRADIENT, dtypes=BOUNDED),
    needs="kv_widths",
    rejects=("wild",),
)
def other_widths_have_gradients(attention: Trial, case: Case) -> None:
    need(attention.claims.gradients, "needs the claim gradients")
    problem = _rebuilt(case, replace(case.config, kdim=case.config.d_model + 1, vdim=2))
    upstream = attention.upstream(problem)
    right = attention.right_gradients(problem, upstream)
    for name, gradient in attention.gradients(problem, upstream).items():
        expect_close(gradient, right[name], because="the gradient with kdim and vdim other than d_model")
