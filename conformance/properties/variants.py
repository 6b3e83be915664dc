"""GQA and XAT: what else an attention may be built as."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, EMPTY, FLOAT
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.accuracy import EVERYDAY_SIZES
from mha.conformance.properties.dropout import DRAWN, SEEDED, expect_dropped
from mha.conformance.properties.long_rows import FEW_QUERIES
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_gradients, expect_result, refuses
from mha.spec import Config, Problem, Weights

WRONGS = ("zeros", "mean", "noise")


def rebuilt(case: Case, config: Config) -> Problem:
    """Return the case's problem with another configuration: weights of its own, and inputs as wide as it wants."""
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


VARIANT = Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, values=MODERATE, layouts=DENSE)


def grouped(case: Case) -> Config:
    """Return the case's configuration with fewer key/value heads."""
    groups = [count for count in range(1, case.n_heads) if case.n_heads % count == 0]
    return replace(case.config, n_kv_heads=groups[case.seed % len(groups)])


@property_of(
    "GQA-1",
    replace(VARIANT, min_heads=2, masks=(*VARIANT.masks, *EMPTY)),
    needs="grouped_query",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
    number=2,
)
def grouped_heads_equal_repeated_ones(session: Session, case: Case) -> None:
    config = grouped(case)
    problem = rebuilt(case, config)
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    seen, answer = session(problem), session.expected(problem)
    because = f"{config.n_heads} heads on {config.n_kv_heads} key/value heads, each of which serves neighbours"
    expect_result(seen, answer, because)
    repeats, given = config.n_heads // config.kv_heads, problem.weights

    def repeated(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(0, (config.kv_heads, config.head_dim))
        return heads.repeat_interleave(repeats, 0).flatten(0, 1)

    spread = {name: repeated(tensor) for name, tensor in given.named() if name in ("w_k", "w_v", "b_k", "b_v")}
    same = session(problem.change(config=case.config, **spread)).output
    expect_agree(seen.output, same, bounds=(answer.output, answer.output), because="each key/value head repeated")


@property_of(
    "GQA-1",
    EVERYDAY_SIZES,
    needs="grouped_query",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
    max_cases=5,
    number=3,
)
def grouped_heads_of_everyday_sizes_match_the_oracle(session: Session, case: Case) -> None:
    problem = rebuilt(case, grouped(case))
    told = f"the oracle's value for {problem.config.n_kv_heads} key/value heads"
    expect_result(session(problem), session.expected(problem), told)


@property_of(
    "GQA-1",
    replace(FEW_QUERIES, min_heads=2),
    needs="grouped_query",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
    max_cases=4,
    number=4,
)
def grouped_heads_on_long_rows_match_the_oracle(session: Session, case: Case) -> None:
    wider = replace(case, n_heads=4, L=2)
    problem = rebuilt(wider, replace(wider.config, n_kv_heads=2))  # with one for all, none can be mistaken
    expect_result(session(problem), session.expected(problem), f"the oracle's value for {case.S} keys")


@property_of(
    "GQA-1",
    replace(SEEDED, min_heads=2),
    needs=("grouped_query", "dropout"),
    requires="HED-1",
    must_reject=("zeros",),
    max_cases=4,
    number=5,
)
def grouped_heads_drop(session: Session, case: Case) -> None:
    problem = rebuilt(case, replace(grouped(case), dropout=0.5))
    one, other = (session(problem, seed=seed).output for seed in (1, 2))
    told = f"{other.code} is {one.code}, though p = 0.5 and the seed is another"
    expect(not torch.equal(one.tensor, other.tensor), told, f"assert not {one.code}.equal({other.code})")
    because = "the oracle's value: in evaluation nothing is dropped"
    expect_close(session(problem, mode="eval").output, session.expected(problem).output, because=because)


@property_of(
    "GQA-1",
    replace(DRAWN, min_heads=2),
    needs=("grouped_query", "dropout=True"),
    requires="HED-1",
    must_reject=("zeros", "noise"),
    max_cases=4,
    number=6,
)
def grouped_heads_drop_each_weight_alone(session: Session, case: Case) -> None:
    case = replace(case, L=17, S=17, head_dim=34)
    expect_dropped(session, rebuilt(case, grouped(case)), 0.5, case.seed)


@property_of(
    "GQA-1",
    replace(VARIANT, min_heads=2, modes=WITH_GRADIENT, masks=(*VARIANT.masks, *EMPTY)),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached"),
    min_rejection_rate=0.3,
    number=7,
)
def grouped_heads_have_gradients(session: Session, case: Case) -> None:
    problem = rebuilt(case, grouped(case))
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    expect_gradients(session, problem, None, f"with {problem.config.n_kv_heads} key/value heads")


@property_of(
    "XAT-1",
    replace(VARIANT, inputs=("cross",)),
    needs="kv_widths",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
)
def other_widths_match_the_oracle(session: Session, case: Case) -> None:
    # One of the two is left at its default, one time in three each.
    kdim = None if case.seed % 3 == 1 else 1 + case.seed % 7
    vdim = None if case.seed % 3 == 2 else 1 + case.seed // 7 % 7
    problem = rebuilt(case, replace(case.config, kdim=kdim, vdim=vdim))
    because = f"the oracle's value with kdim = {kdim} and vdim = {vdim}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "XAT-1",
    replace(VARIANT, inputs=("cross",), modes=WITH_GRADIENT),
    needs=("kv_widths", "gradients"),
    must_reject=("nan_gradients", "detached"),
    min_rejection_rate=0.3,
    number=2,
)
def other_widths_have_gradients(session: Session, case: Case) -> None:
    problem = rebuilt(case, replace(case.config, kdim=case.config.d_model + 1, vdim=2))
    expect_gradients(session, problem, None, "with kdim and vdim other than d_model")
