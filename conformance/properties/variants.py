"""GQA, XAT, VAL, and heads of their own width (HED-1, GRD-1): less common configurations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import (
    with_config,
    with_dropout,
    with_other_options,
    with_width,
)
from mha.conformance.cases.variants import as_variant
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.errors import AdapterError, CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import (
    DROPOUT_PATTERNS,
    DROPOUT_SEEDS,
    EVERYDAY_SIZES,
    FEW_QUERIES,
    SEVERAL_OPTIONS,
)
from mha.conformance.properties.support.dropout_statistics import expect_dropped_weights
from mha.conformance.properties.support.module_life import LIFETIME, expect_lifetime
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_gradients,
    expect_result,
    expect_together,
)
from mha.spec import Problem, Weights

DEFECTS = ("lopsided", "slightly_lopsided")
ANY = Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, values=MODERATE, layouts=DENSE)
WITH_EMPTY_ROWS = replace(ANY, masks=(*ANY.masks, *EMPTY))
OWN_WIDTH = replace(ANY, variants=("own_width",))
OTHER_WIDTHS = replace(ANY, variants=("other_widths",), inputs=("cross",))
VALUE_WIDTH = replace(WITH_EMPTY_ROWS, variants=("value_width",), inputs=("cross",))


def _grouped(domain: Domain) -> Domain:
    """Return a domain of cases with fewer key/value heads than query heads."""
    return replace(domain, variants=("grouped",), min_heads=2)


@property_of(
    "GQA-1",
    _grouped(LIFETIME),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("lopsided", "nan_gradients"),
    max_cases=6,
)
def one_module_with_grouped_heads_serves_all_its_life(session: Session, case: Case) -> None:
    """One module with grouped heads is correct in inference, in training, and with new weights."""
    expect_lifetime(session, case.problem())


@property_of(
    "GQA-1",
    _grouped(WITH_EMPTY_ROWS),
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    number=2,
)
def grouped_heads_equal_repeated_ones(session: Session, case: Case) -> None:
    """With fewer key/value heads the result equals that of each repeated for its neighbours."""
    problem = case.problem()
    config = problem.config
    assume_answered(session, problem)
    result = session(problem)
    because = (
        f"{config.n_heads} heads on {config.n_kv_heads} key/value heads, each shared by"
        " neighbouring heads"
    )
    expect_result(result, session.expected(problem), because)
    plain = session(_with_repeated_heads(problem)).output
    bound = session.bound_of(problem)
    expect_agree(
        result.output, plain, bound, because="the output with each key/value head repeated"
    )


def _with_repeated_heads(problem: Problem) -> Problem:
    """Return the problem with each key/value head repeated, as many as query heads."""
    config = problem.config
    repeats, heads = config.n_heads // config.kv_heads, (config.kv_heads, config.head_dim)

    def repeated(x: Tensor, dim: int) -> Tensor:
        dim %= x.ndim
        by_heads: Tensor = x.unflatten(dim, heads).repeat_interleave(repeats, dim)
        return by_heads.flatten(dim, dim + 1)

    plain = replace(config, n_kv_heads=None)
    if config.projected:
        spread = {}
        for name, x in problem.weights.named():
            of_all_heads = name == "k_norm" and config.norm_weights == "width"
            if of_all_heads or name in ("w_k", "w_v", "b_k", "b_v"):
                spread[name] = repeated(x, 0)
        return problem.change(config=plain, **spread)
    plain = plain.of_heads()
    weights = Weights.identity(plain, problem.query.dtype, problem.query.device)
    key, value = (repeated(x, -1) for x in (problem.key, problem.value))
    return replace(problem, config=plain, weights=weights, key=key, value=value)


@property_of(
    "GQA-1",
    _grouped(EVERYDAY_SIZES),
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=5,
    number=3,
)
def grouped_heads_of_everyday_sizes_match_the_oracle(session: Session, case: Case) -> None:
    """Grouped heads of the sizes of everyday models match the oracle."""
    problem = case.problem()
    because = f"the oracle's value for {case.n_kv_heads} key/value heads"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "GQA-1",
    _grouped(FEW_QUERIES),
    needs=("grouped_query", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=4,
    number=4,
)
def grouped_heads_on_long_rows_match_the_oracle(session: Session, case: Case) -> None:
    """Grouped heads match the oracle for rows of many keys."""
    # If all heads shared one, none could be mistaken.
    problem = replace(case, n_heads=4, n_kv_heads=2, L=2).problem()
    because = f"the oracle's value for {case.S} keys"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "GQA-1",
    _grouped(DROPOUT_SEEDS),
    needs=("grouped_query", "dropout"),
    requires="HED-1",
    must_reject=("zeros",),
    max_cases=4,
    number=5,
)
def grouped_heads_drop(session: Session, case: Case) -> None:
    """Grouped heads drop in training, according to the seed, and not in evaluation."""
    problem = with_dropout(case.problem(), 0.5)
    one, other = (session(problem, seed=seed).output for seed in (1, 2))
    message = f"{other.code} equals {one.code}, though p = 0.5 and the seeds differ"
    expect(
        not torch.equal(one.tensor, other.tensor),
        message,
        f"assert not {one.code}.equal({other.code})",
    )
    because = "the oracle's value: nothing is dropped in evaluation"
    expect_close(
        session(problem, mode="eval").output, session.expected(problem).output, because=because
    )


@property_of(
    "GQA-1",
    _grouped(DROPOUT_PATTERNS),
    needs=("grouped_query", "dropout=True"),
    requires="HED-1",
    must_reject=("zeros", "lopsided"),
    max_cases=4,
    number=6,
)
def grouped_heads_drop_each_weight_alone(session: Session, case: Case) -> None:
    """With grouped heads each weight is dropped on its own with probability p, or rescaled."""
    case = with_width(replace(case, L=17, S=17), session.claims, 34)
    expect_dropped_weights(session, case.problem(), 0.5, case.seed)


@property_of(
    "GQA-1",
    _grouped(replace(WITH_EMPTY_ROWS, modes=WITH_GRADIENT)),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=7,
)
def grouped_heads_have_gradients(session: Session, case: Case) -> None:
    """The gradients with grouped heads are within the bound."""
    problem = case.problem()
    assume_answered(session, problem)
    expect_gradients(session, problem, None, f"with {case.n_kv_heads} key/value heads")


@property_of(
    "GQA-1",
    _grouped(replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=BOUNDED)),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=3,
    number=11,
)
def grouped_heads_of_everyday_sizes_have_gradients(session: Session, case: Case) -> None:
    """The gradients with grouped heads of the sizes of everyday models are within the bound."""
    expect_gradients(session, case.problem(), None, f"with {case.n_kv_heads} key/value heads")


# The causal flag beside an extra key is a matter of PTH-5.
TOGETHER = replace(ANY, causal=(False,), inputs=("cross",), need_weights=(False,))


@property_of(
    "GQA-1",
    replace(
        TOGETHER, variants=("grouped",), min_heads=4
    ),  # so that there may be several key/value heads
    needs="grouped_query",
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=8,
    number=10,
)
def grouped_heads_go_with_other_options(session: Session, case: Case) -> None:
    """Grouped heads match the oracle beside other options that are claimed, too."""
    _expect_together(session, case)


@property_of(
    "XAT-1",
    replace(TOGETHER, variants=("other_widths",)),
    needs=("kv_widths", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=8,
    number=4,
)
def other_widths_go_with_other_options(session: Session, case: Case) -> None:
    """Other widths of key and value match the oracle beside other options that are claimed, too."""
    _expect_together(session, case)


def _expect_together(session: Session, case: Case) -> None:
    """Expect the oracle's output with other options, unless they are refused together."""
    together = with_other_options(case, session.claims)
    assume(together != case.config, "no other option is claimed")
    problem = with_config(case, together)
    try:
        output = session(problem).output
    except (CallRaised, AdapterError):
        assume(False, f"{together} is refused")
    expect_close(
        output, session.expected(problem).output, because=f"the oracle's value for {together}"
    )


@property_of(
    "HED-1",
    OWN_WIDTH,
    needs="own_head_dim",
    must_reject=(*DEFECTS, "unscaled"),
    number=2,
)
def heads_of_their_own_width_match_the_loop(session: Session, case: Case) -> None:
    """With heads wider or narrower than d_model / n_heads the result equals the loop over heads."""
    problem = case.problem()
    because = (
        f"the loop over {case.n_heads} heads of width {case.head_dim}, with d_model ="
        f" {case.d_model}"
    )
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "GRD-1",
    replace(OWN_WIDTH, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("own_head_dim", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=10,
)
def heads_of_their_own_width_have_gradients(session: Session, case: Case) -> None:
    """The gradients with heads of a width that is not d_model / n_heads are within the bound."""
    because = f"with heads of width {case.head_dim} and d_model = {case.d_model}"
    expect_gradients(session, case.problem(), None, because)


@property_of(
    "XAT-1",
    OTHER_WIDTHS,
    needs=("kv_widths", "cross_attention"),
    requires="HED-1",
    must_reject=DEFECTS,
)
def other_widths_match_the_oracle(session: Session, case: Case) -> None:
    """kdim and vdim other than D work, and match the oracle."""
    problem = case.problem()
    because = f"the oracle's value with kdim = {case.kdim} and vdim = {case.vdim}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "XAT-1",
    replace(OTHER_WIDTHS, modes=WITH_GRADIENT),
    needs=("kv_widths", "cross_attention", "gradients"),
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=2,
)
def other_widths_have_gradients(session: Session, case: Case) -> None:
    """The gradients with kdim and vdim other than D are within the bound."""
    because = f"with kdim = {case.kdim} and vdim = {case.vdim}"
    expect_gradients(session, case.problem(), None, because)


@property_of(
    "VAL-1",
    VALUE_WIDTH,
    needs="value_width",
    requires="HED-1",
    must_reject=DEFECTS,
)
def values_of_their_own_width_match_the_oracle(session: Session, case: Case) -> None:
    """Contexts have the width of the values, and every column of them matches the oracle."""
    problem = case.problem()
    assume_answered(session, problem)
    because = (
        f"the oracle's value, for values of width {case.d_value} and queries of width"
        f" {case.head_dim}"
    )
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "VAL-1",
    replace(VALUE_WIDTH, masks=ANY.masks, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("value_width", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=2,
)
def values_of_their_own_width_have_gradients(session: Session, case: Case) -> None:
    """The gradients with values of a width of their own are within the bound."""
    expect_gradients(session, case.problem(), None, f"for values of width {case.d_value}")


@property_of(
    "VAL-1",
    replace(SEVERAL_OPTIONS, variants=("value_width",), inputs=("cross",)),
    needs="value_width",
    requires="HED-1",
    must_reject=DEFECTS,
    max_cases=24,
    number=3,
)
def values_of_their_own_width_go_with_other_options(session: Session, case: Case) -> None:
    """Beside grouped heads and options on the scores, contexts match the oracle too."""
    if session.claims.grouped_query and case.seed % 4:
        case = as_variant(case, "grouped", session.claims)
    expect_together(session, case.problem())
