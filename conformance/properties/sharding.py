"""DST: attention sharded over ranks; each case runs on ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import lcm

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import (
    as_claimed,
    with_dropout,
    with_weights_as_output,
    zeroed,
)
from mha.conformance.harness.assertions import assume, expect, expect_close, expect_raises
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_backward,
    expect_gradients,
)
from mha.conformance.sharding.gathered import copies_of, in_larger_group, keys_of_rank
from mha.conformance.sharding.group import RankError
from mha.spec import Problem
from mha.spec.bounds import Ball
from mha.spec.problem import INPUTS

RANKS = (2, 4, 3, 8)
# Parts of a few positions: what goes wrong at a cut does so whatever the length.
SHARDED = Domain(
    causal=BOTH,
    values=MODERATE,
    layouts=DENSE,
    need_weights=(False,),
    ranks=RANKS,
    max_heads=4,
    max_length=33,
)
TRAINED = replace(SHARDED, modes=WITH_GRADIENT)
# Where DTensor chooses placements by what they cost, it may choose others than for parts of a few
# positions.
LARGE = Domain(
    scale="wide",
    values=("normal",),
    layouts=DENSE,
    modes=("eval", "train", "no_grad"),
    need_weights=(False,),
    ranks=RANKS,
    sizes={"n_heads": (8,), "head_dim": (32,), "B": (4, 3), "L": (32,), "S": (32,)},
)
MASKED = replace(SHARDED, masks=(*BOOLEAN, *FLOAT, *EMPTY), modes=WITH_GRADIENT)
GRADIENT_DEFECTS = ("unscaled", "detached", "softmax_gradient_without_row_sum")


def divisible(case: Case) -> Case:
    """Return the case with sizes that no implementation refuses, multiples of the ranks."""
    unit = 2 * case.ranks

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    n_heads = up(case.n_heads, case.ranks)
    return replace(case, n_heads=n_heads, L=up(case.L, unit), S=up(case.S, unit))


def expect_output(session: Session, problem: Problem, because: str) -> None:
    """The output, and each copy of it that a rank has, is the oracle's."""
    assume_answered(session, problem)
    output, expected = session(problem).output, session.expected(problem).output
    expect_close(output, expected, because=because)
    _expect_copies(session, lambda: {"output": expected}, because)


def expect_output_and_gradients(session: Session, problem: Problem, because: str) -> None:
    """The output and the gradients, and each copy of them that a rank has, are the oracle's."""
    expect_output(session, problem, because)
    if session.claims.gradients:
        expect_gradients(session, problem, None, because)
        upstream = session.upstream(problem)

        def expected() -> Mapping[str, Ball]:
            output = session.expected(problem).output
            return {"output": output} | session.expected_gradients(problem, upstream)

        _expect_copies(session, expected, because)


def _expect_copies(
    session: Session, expected: Callable[[], Mapping[str, Ball]], because: str
) -> None:
    """The copies of the attention built last are right; the first one has been compared."""
    for name, copies in copies_of(session.latest.attention).items():
        for rank, copy in enumerate(copies):
            if not torch.equal(copy, copies[0]):
                copied = session.record(copy, _code(session, name))
                expect_close(copied, expected()[name], because=f"on rank {rank}, {because}")


def _code(session: Session, name: str) -> str:
    """Return what a rank calls its copy of a tensor of the last call."""
    number = session.steps[-1].number
    if name == "output":
        return f"output_{number}"
    if name in INPUTS:
        return f"{name}_{number}.grad"
    return f"attention_{session.latest.number}.weight_gradients()[{name!r}]"


def expect_right_or_refused(session: Session, problem: Problem, because: str) -> None:
    """Output and gradients are the oracle's, unless every rank refuses the sizes."""
    try:
        expect_output_and_gradients(session, problem, because)
    except CallRaised as raised:
        if isinstance(raised.error, RankError):
            raise


@property_of(
    "DST-1",
    # In inference mode, DTensor takes half a minute for each new shape.
    replace(SHARDED, masks=("none", "padding", "bias"), modes=("eval", "train", "no_grad")),
    needs="world_sizes",
    requires=None,
    must_reject=("zeros", "lopsided", "mean", "unscaled"),
)
def sharded_output_is_the_unsharded_one(session: Session, case: Case) -> None:
    """The gathered output, and each copy of it, is the single-process one."""
    expect_output(
        session, divisible(case).problem(), f"the output of one process, on {case.ranks} ranks"
    )


@property_of(
    "DST-1",
    LARGE,
    needs="world_sizes",
    requires=None,
    must_reject=("zeros", "lopsided", "mean", "unscaled"),
    max_cases=2,
    number=3,
)
def large_calls_are_sharded_alike(session: Session, case: Case) -> None:
    """With tens of thousands of numbers a rank, the output is the single-process one too."""
    expect_output(
        session, divisible(case).problem(), f"the output of one process, on {case.ranks} ranks"
    )


@property_of(
    "DST-2",
    replace(TRAINED, masks=("none", "padding", "bias")),
    needs=("world_sizes", "gradients"),
    requires=None,
    must_reject=GRADIENT_DEFECTS,
)
def sharded_gradients_are_the_unsharded_ones(session: Session, case: Case) -> None:
    """The gradients for a random upstream gradient are the single-process ones, on every rank."""
    problem = divisible(case).problem()
    expect_output_and_gradients(session, problem, f"that of one process, on {case.ranks} ranks")


@property_of(
    "DST-3",
    replace(TRAINED, masks=("none", "padding")),
    needs="world_sizes",
    requires=None,
    must_reject=("zeros", "lopsided", "unscaled"),
)
def uneven_shards_are_right_or_refused(session: Session, case: Case) -> None:
    """Lengths and heads that the ranks do not divide are right, or refused on every rank."""
    uneven = case.L % case.ranks or case.S % case.ranks or case.n_heads % case.ranks
    assume(bool(uneven), "the ranks divide all sizes")
    because = f"L = {case.L}, S = {case.S} and {case.n_heads} heads on {case.ranks} ranks"
    expect_right_or_refused(session, case.problem(), because)


@property_of(
    "DST-4",
    replace(TRAINED, causal=(True,), min_L=5, min_S=5),
    needs="world_sizes",
    requires=None,
    must_reject=("lopsided", "unmasked", "unscaled"),
)
def causality_goes_by_global_positions(session: Session, case: Case) -> None:
    """A causal call compares positions in the whole sequence."""
    expect_output_and_gradients(
        session, divisible(case).problem(), "by positions in the whole sequence"
    )


@property_of(
    "DST-5",
    replace(MASKED, min_S=3),
    needs="world_sizes",
    requires=None,
    must_reject=("lopsided", "unmasked"),
)
def masks_cross_shards(session: Session, case: Case) -> None:
    """Masks act on the same queries and keys wherever the shards are cut."""
    expect_output_and_gradients(session, divisible(case).problem(), f"with a mask {case.mask!r}")


@property_of(
    "DST-6",
    replace(TRAINED, min_S=3),
    needs=("world_sizes", "masks=bool|float"),
    requires=None,
    must_reject=("lopsided", "unmasked"),
)
def a_rank_without_allowed_keys_adds_nothing(session: Session, case: Case) -> None:
    """Where no key of a rank is allowed, that rank changes neither output nor gradients."""
    case = divisible(case)
    problem, rank = case.problem(), case.seed % case.ranks
    items = case.B if session.claims.per_item_mask else 1
    of_items = []
    for item in range(items):  # no key of the next rank for the next item, and so on
        hidden_rank = (rank + item) % case.ranks
        of_items.append(keys_of_rank(session.implementation, hidden_rank, case.ranks, case.S))
    hidden = torch.stack(of_items)
    problem = as_claimed(session.claims, problem, ~hidden[:, None, None, :].to(case.device))
    assume(session.claims.combines_causal or not case.causal, "a causal call takes no mask")
    expect_output_and_gradients(session, problem, f"no key of rank {rank} is allowed to item 0")


@property_of(
    "DST-7",
    replace(TRAINED, masks=("none", "padding")),
    needs=("world_sizes", "grouped_query"),
    requires=None,
    must_reject=("zeros", "lopsided", "unscaled"),
)
def few_key_value_heads_are_right_or_refused(session: Session, case: Case) -> None:
    """Grouped heads are right; where the ranks do not divide them, they may be refused."""
    heads = (1, 3, case.ranks)[case.seed % 3]
    case = replace(divisible(case), n_heads=2 * lcm(heads, case.ranks), n_kv_heads=heads)
    problem = case.problem()
    because = f"{case.n_heads} heads on {heads} key/value heads, and {case.ranks} ranks"
    if heads % case.ranks:
        expect_right_or_refused(session, problem, because)
    else:
        expect_output_and_gradients(session, problem, because)


@property_of(
    "DST-8",
    replace(TRAINED, bias=("o",)),
    needs="world_sizes",
    requires=None,
    must_reject=("lopsided",),
    max_cases=12,
)
def replicated_bias_counts_once(session: Session, case: Case) -> None:
    """With W_o = 0 the output is b_o, and the gradient of b_o the sum of the upstream gradient."""
    problem = zeroed(divisible(case).problem(), "w_o")
    expect_output_and_gradients(session, problem, f"b_o counts once, on {case.ranks} ranks")


@property_of(
    "DST-9",
    replace(TRAINED, masks=("none", "padding"), ranks=(1,)),
    needs=("world_sizes", "world_sizes=1"),
    requires=None,
    must_reject=("zeros", "lopsided", "unscaled"),
    max_cases=8,
)
def one_rank_equals_no_sharding(session: Session, case: Case) -> None:
    """On a mesh of one rank the result is that of one process."""
    expect_output_and_gradients(session, divisible(case).problem(), "on a mesh of one rank")


@property_of(
    "DST-9",
    replace(TRAINED, masks=("none", "padding")),
    needs="world_sizes",
    requires=None,
    must_reject=("zeros", "lopsided", "unscaled"),
    max_cases=8,
    number=2,
)
def numbers_of_ranks_do_not_matter(session: Session, case: Case) -> None:
    """On a mesh of the last ranks of a larger group, the result is the same."""
    problem = divisible(case).problem()
    plain = session.built(problem)
    instance = session.derive(plain, in_larger_group, "{}.in_larger_group()")
    leaves = problem.map_inputs(lambda x: x.clone().requires_grad_())
    assume_answered(session, problem)
    because = f"on {case.ranks} ranks of a group of {case.ranks + 1}"
    expect_close(
        session(problem, via=instance).output, session.expected(problem).output, because=because
    )
    if session.claims.gradients:
        expect_backward(session, leaves, session.forward(leaves, instance), because, of=instance)


@property_of(
    "DST-10",
    replace(TRAINED, masks=("none", "empty_item", "empty_rows", "padding")),
    needs="world_sizes",
    requires=None,
    must_reject=("lopsided",),
    max_cases=8,
)
def every_rank_ends(session: Session, case: Case) -> None:
    """Every rank ends, also without work; after an invalid call the next one is right."""
    expect_right_or_refused(session, case.problem(), "whatever a rank has to do")
    problem = divisible(case).problem()
    wide = problem.change(query=torch.cat([problem.query, problem.query[..., :1]], -1))
    width, d_model = wide.query.shape[-1], problem.config.d_model
    because = f"the query is {width} wide, and d_model is {d_model}"
    error = expect_raises(lambda: session(wide, via=session.built(problem)), because=because)
    if isinstance(error, RankError):
        raise Violation(f"an invalid call was not refused on every rank: {error}")
    assume_answered(session, problem)
    expect_close(
        session(problem).output,
        session.expected(problem).output,
        because="after a call that was refused",
    )


@property_of(
    "DST-11",
    Domain(
        values=("normal",),
        layouts=DENSE,
        modes=("train",),
        need_weights=(False,),
        ranks=RANKS,
        max_length=33,
    ),
    needs=("world_sizes", "world_sizes=1", "dropout"),
    requires=None,
    must_reject=("zeros",),
    max_cases=4,
)
def dropout_does_not_depend_on_the_ranks(session: Session, case: Case) -> None:
    """With one seed, the same is dropped on one rank as on several."""
    case = replace(divisible(case), B=2, n_heads=2 * case.ranks, L=16, S=16)
    problem = with_dropout(with_weights_as_output(case, session.claims), 0.5)
    single = Session(session.implementation, replace(case, ranks=1))
    one, several = (each(problem, seed=case.seed).output.tensor == 0 for each in (single, session))
    again = session(problem, seed=case.seed + 1).output.tensor == 0
    expect(not torch.equal(several, again), "two seeds drop the same, though p = 0.5")
    different = int((one != several).sum())
    expect(
        not different,
        f"{different} of {one.numel()} numbers are dropped on 1 or on {case.ranks} ranks only",
    )
