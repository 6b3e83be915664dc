"""GQA, XAT and VAL, and HED-1 and GRD-1 for heads of their own width: configurations that are not everyday ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import (
    grouped,
    own_head_dim,
    own_value_width,
    with_config,
    with_other_options,
    with_width,
)
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.errors import AdapterError, CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.domains import DROPOUT_PATTERNS, DROPOUT_SEEDS, EVERYDAY_SIZES, FEW_QUERIES
from mha.conformance.properties.dropout_statistics import expect_dropped_weights
from mha.conformance.properties.lifetime import LIFETIME, expect_lifetime
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_gradients, expect_result, refuses
from mha.spec import Config, Problem, Weights

DEFECTS = ("lopsided", "slightly_lopsided")
VARIANT = Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, values=MODERATE, layouts=DENSE)


@property_of(
    "GQA-1",
    replace(LIFETIME, min_heads=2),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("lopsided", "nan_gradients"),
    max_cases=6,
)
def one_module_with_grouped_heads_serves_all_its_life(session: Session, case: Case) -> None:
    """One module with grouped heads is correct in inference, in training, and with new weights."""
    expect_lifetime(session, with_config(case, grouped(case)))


@property_of(
    "GQA-1",
    replace(VARIANT, min_heads=2, masks=(*VARIANT.masks, *EMPTY)),
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    number=2,
)
def grouped_heads_equal_repeated_ones(session: Session, case: Case) -> None:
    """With fewer key/value heads the result equals repeating each of them for neighbouring query heads."""
    config = grouped(case)
    problem = with_config(case, config)
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    result = session(problem)
    because = f"{config.n_heads} heads on {config.n_kv_heads} key/value heads, each shared by neighbouring heads"
    expect_result(result, session.expected(problem), because)
    plain = session(_with_repeated_heads(problem, case.config)).output
    bound = session.bound_of(problem)
    expect_agree(result.output, plain, bound, because="the output with each key/value head repeated")


def _with_repeated_heads(problem: Problem, plain: Config) -> Problem:
    """Return the problem with each key/value head repeated; plain: the configuration with as many as query heads."""
    config = problem.config
    repeats, heads = config.n_heads // config.kv_heads, (config.kv_heads, config.head_dim)

    def repeated(x: Tensor, dim: int) -> Tensor:
        spread: Tensor = x.unflatten(dim, heads).repeat_interleave(repeats, dim if dim >= 0 else dim - 1)
        return spread.flatten(dim, dim + 1) if dim >= 0 else spread.flatten(dim - 1)

    if config.projected:
        named = ((name, x) for name, x in problem.weights.named() if name in ("w_k", "w_v", "b_k", "b_v"))
        return problem.change(config=plain, **{name: repeated(x, 0) for name, x in named})
    weights = Weights.identity(plain, problem.query.dtype, problem.query.device)
    key, value = (repeated(x, -1) for x in (problem.key, problem.value))
    return replace(problem, config=plain, weights=weights, key=key, value=value)


@property_of(
    "GQA-1",
    EVERYDAY_SIZES,
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=5,
    number=3,
)
def grouped_heads_of_everyday_sizes_match_the_oracle(session: Session, case: Case) -> None:
    """Grouped heads of the sizes of everyday models match the oracle."""
    problem = with_config(case, grouped(case))
    because = f"the oracle's value for {problem.config.n_kv_heads} key/value heads"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "GQA-1",
    replace(FEW_QUERIES, min_heads=2),
    needs=("grouped_query", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=4,
    number=4,
)
def grouped_heads_on_long_rows_match_the_oracle(session: Session, case: Case) -> None:
    """Grouped heads match the oracle for rows of many keys."""
    wider = replace(case, n_heads=4, L=2)
    problem = with_config(wider, replace(wider.config, n_kv_heads=2))  # if all shared one, none could be mistaken
    expect_result(session(problem), session.expected(problem), f"the oracle's value for {case.S} keys")


@property_of(
    "GQA-1",
    replace(DROPOUT_SEEDS, min_heads=2),
    needs=("grouped_query", "dropout"),
    requires="HED-1",
    must_reject=("zeros",),
    max_cases=4,
    number=5,
)
def grouped_heads_drop(session: Session, case: Case) -> None:
    """Grouped heads drop in training, according to the seed, and not in evaluation."""
    problem = with_config(case, replace(grouped(case), dropout=0.5))
    one, other = (session(problem, seed=seed).output for seed in (1, 2))
    message = f"{other.code} equals {one.code}, though p = 0.5 and the seeds differ"
    expect(not torch.equal(one.tensor, other.tensor), message, f"assert not {one.code}.equal({other.code})")
    because = "the oracle's value: nothing is dropped in evaluation"
    expect_close(session(problem, mode="eval").output, session.expected(problem).output, because=because)


@property_of(
    "GQA-1",
    replace(DROPOUT_PATTERNS, min_heads=2),
    needs=("grouped_query", "dropout=True"),
    requires="HED-1",
    must_reject=("zeros", "lopsided"),
    max_cases=4,
    number=6,
)
def grouped_heads_drop_each_weight_alone(session: Session, case: Case) -> None:
    """With grouped heads each weight is dropped on its own with probability p, and rescaled otherwise."""
    case = with_width(replace(case, L=17, S=17), session.claims, 34)
    expect_dropped_weights(session, with_config(case, grouped(case)), 0.5, case.seed)


@property_of(
    "GQA-1",
    replace(VARIANT, min_heads=2, modes=WITH_GRADIENT, masks=(*VARIANT.masks, *EMPTY)),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=7,
)
def grouped_heads_have_gradients(session: Session, case: Case) -> None:
    """The gradients with grouped heads are within the bound."""
    problem = with_config(case, grouped(case))
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    expect_gradients(session, problem, None, f"with {problem.config.n_kv_heads} key/value heads")


@property_of(
    "GQA-1",
    replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=3,
    number=11,
)
def grouped_heads_of_everyday_sizes_have_gradients(session: Session, case: Case) -> None:
    """The gradients with grouped heads of the sizes of everyday models are within the bound."""
    problem = with_config(case, grouped(case))
    expect_gradients(session, problem, None, f"with {problem.config.n_kv_heads} key/value heads")


# The causal flag beside an extra key is a matter of PTH-5.
TOGETHER = replace(VARIANT, causal=(False,), inputs=("cross",), need_weights=(False,))


@property_of(
    "GQA-1",
    replace(TOGETHER, min_heads=4),  # so that there may be several key/value heads
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=8,
    number=10,
)
def grouped_heads_go_with_other_options(session: Session, case: Case) -> None:
    """Grouped heads match the oracle beside other options that are claimed, too."""
    _expect_together(session, case, grouped(case))


@property_of(
    "XAT-1",
    TOGETHER,
    needs=("kv_widths", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=8,
    number=4,
)
def other_widths_go_with_other_options(session: Session, case: Case) -> None:
    """Other widths of key and value match the oracle beside other options that are claimed, too."""
    kdim = case.config.d_model + 1
    vdim = kdim if case.inputs == "memory" else 3
    _expect_together(session, case, replace(case.config, kdim=kdim, vdim=vdim))


def _expect_together(session: Session, case: Case, config: Config) -> None:
    """Expect the oracle's output for a configuration with other options, which may be refused together."""
    together = with_other_options(case, session.claims, config)
    assume(together != config, "no other option is claimed")
    problem = with_config(case, together)
    try:
        output = session(problem).output
    except (CallRaised, AdapterError):
        assume(False, f"{together} is refused")
    expect_close(output, session.expected(problem).output, because=f"the oracle's value for {together}")


@property_of(
    "HED-1",
    VARIANT,
    needs="own_head_dim",
    must_reject=(*DEFECTS, "unscaled"),
    number=2,
)
def heads_of_their_own_width_match_the_loop(session: Session, case: Case) -> None:
    """With heads of a width that is not d_model / n_heads, the result equals the loop over heads."""
    config = own_head_dim(case, session.claims)
    problem = with_config(case, config)
    because = f"the loop over {config.n_heads} heads of width {config.d_head}, with d_model = {config.d_model}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "GRD-1",
    replace(VARIANT, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("own_head_dim", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=10,
)
def heads_of_their_own_width_have_gradients(session: Session, case: Case) -> None:
    """The gradients with heads of a width that is not d_model / n_heads are within the bound."""
    config = own_head_dim(case, session.claims)
    problem = with_config(case, config)
    expect_gradients(session, problem, None, f"with heads of width {config.d_head} and d_model = {config.d_model}")


@property_of(
    "XAT-1",
    replace(VARIANT, inputs=("cross",)),
    needs=("kv_widths", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
)
def other_widths_match_the_oracle(session: Session, case: Case) -> None:
    """kdim and vdim other than D work, and match the oracle."""
    # Each of the two is left at its default one time in three.
    kdim = None if case.seed % 3 == 1 else 1 + case.seed % 7
    vdim = None if case.seed % 3 == 2 else 1 + case.seed // 7 % 7
    if case.inputs == "memory":
        kdim = vdim = 1 + case.seed % 7
    problem = with_config(case, replace(case.config, kdim=kdim, vdim=vdim))
    because = f"the oracle's value with kdim = {kdim} and vdim = {vdim}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "XAT-1",
    replace(VARIANT, inputs=("cross",), modes=WITH_GRADIENT),
    needs=("kv_widths", "cross_attention", "gradients"),
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=2,
)
def other_widths_have_gradients(session: Session, case: Case) -> None:
    """The gradients with kdim and vdim other than D are within the bound."""
    vdim = case.config.d_model + 1 if case.inputs == "memory" else 2
    problem = with_config(case, replace(case.config, kdim=case.config.d_model + 1, vdim=vdim))
    expect_gradients(session, problem, None, "with kdim and vdim other than d_model")


@property_of(
    "VAL-1",
    replace(VARIANT, inputs=("cross",), masks=(*VARIANT.masks, *EMPTY)),
    needs="value_width",
    requires="HED-1",
    must_reject=DEFECTS,
)
def values_of_their_own_width_match_the_oracle(session: Session, case: Case) -> None:
    """Contexts have the width of the values, and every column of them matches the oracle."""
    config = own_value_width(case, session.claims)
    problem = with_config(case, config)
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    because = f"the oracle's value, for values of width {config.d_value} and queries of width {config.head_dim}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "VAL-1",
    replace(VARIANT, inputs=("cross",), modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("value_width", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=2,
)
def values_of_their_own_width_have_gradients(session: Session, case: Case) -> None:
    """The gradients with values of a width of their own are within the bound."""
    config = own_value_width(case, session.claims)
    problem = with_config(case, config)
    expect_gradients(session, problem, None, f"for values of width {config.d_value}")
