"""ROT and QKN: rotations and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    BOTH,
    BOUNDED,
    DENSE,
    HALF,
    MODERATE,
    MOST_VALUES,
    WITH_GRADIENT,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FLOAT
from mha.conformance.cases.transforms import as_claimed, zeroed
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.harness.textbook import TextbookAttention
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.decoded_sequence import DecodedSequence
from mha.conformance.properties.support.directed_errors import (
    Known,
    assume_modelled,
    expect_errors_of_rounding,
)
from mha.conformance.properties.support.directions import Direction
from mha.conformance.properties.support.domains import DECODING
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    assume_finite,
    expect_gradients,
    expect_other_than,
    expect_result,
)
from mha.spec import Claims
from mha.spec.rounding_graph import RoundingGraph
from mha.spec.sizes import smallest_from

# Of one key the weight is 1, wherever it is.
SEVERAL = Domain(
    masks=("none", *BOOLEAN, *FLOAT),
    causal=BOTH,
    values=MODERATE,
    variants=("plain", "grouped"),
    min_L=2,
    min_S=2,
    max_length=33,
)
TRAINED = replace(SEVERAL, masks=COMMON, modes=WITH_GRADIENT, dtypes=BOUNDED, layouts=DENSE)
# More than there are whole numbers in a row in bfloat16.
MANY_POSITIONS = 300
# So many that frequencies rounded to bfloat16 turn the fastest pairs by half a radian.
FAR_POSITIONS = 512


@property_of(
    "ROT-1",
    SEVERAL,
    needs="rotary",
    requires="SHP-1",
    must_reject=("ignores_rotary", "key_not_rotated", "other_pairs", "lopsided"),
)
def rotated_heads_give_the_oracles_result(session: Session, case: Case) -> None:
    """Queries and keys are rotated by their positions, in the declared pairs and by the base."""
    problem = case.problem()
    assume_answered(session, problem)
    because = f"the oracle's value, with {session.claims.rotary}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "ROT-1",
    replace(SEVERAL, masks=("none",), passes=("bool",), layouts=DENSE),
    needs=("rotary", "masks", "qk_norm.places_count=False|None"),
    requires="SHP-1",
    must_reject=("key_not_rotated",),
    number=2,
)
def only_differences_of_positions_count(session: Session, case: Case) -> None:
    """Masked positions before all others, which move them all, change nothing."""
    problem, moved = case.problem(), 1 + case.seed % 5
    assume(not session.claims.prefix_masks, "masks allow the first keys")
    generator = case.generator

    def with_others_before(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(len(x), moved, x.shape[-1], generator=generator)
        return torch.cat([drawn.to(x), x], 1)

    longer = problem.map_inputs(with_others_before)
    seen = torch.arange(longer.key.shape[1], device=longer.key.device) >= moved
    longer = as_claimed(session.claims, longer, seen.view(1, 1, 1, -1))
    assume(
        not problem.is_causal or session.claims.combines_causal,
        "a mask beside the causal flag is not claimed",
    )
    assume_answered(session, longer)
    rows = (slice(None), slice(moved, None))
    output, expected = session(longer).output[rows], session(problem).output
    bounds = session.bound_of(longer, rows), session.bound_of(problem)
    because = f"the output without the {moved} masked positions before all others"
    expect_agree(output, expected, *bounds, because=because)


@property_of(
    "ROT-1",
    replace(SEVERAL, masks=("none",), values=("normal",)),
    needs="rotary",
    requires="SHP-1",
    must_reject=("ignores_rotary",),
    number=3,
)
def a_rotation_has_an_effect(session: Session, case: Case) -> None:
    """Where a rotation changes the exact result by ten times the bound, the result changes too."""
    without = replace(session.claims, rotary=None)
    _expect_effect(session, case, without, "the rotation has no effect here")


def _expect_effect(session: Session, case: Case, without: Claims, says: str) -> None:
    problem = case.problem()
    output = session(problem).output  # first: no frame above a call holds an answer
    expected = session.expected(problem).output
    expect_other_than(output, session.expected(problem, without).output, expected, says)


@property_of(
    "ROT-1",
    replace(SEVERAL, masks=("none",), values=("normal",), inputs=("self",), max_length=2),
    needs="rotary",
    requires="SHP-1",
    must_reject=("lopsided",),
    max_cases=2,
    number=4,
)
def positions_of_long_sequences_are_exact(session: Session, case: Case) -> None:
    """Positions above 256, the last whole number without a gap in bfloat16, are right."""
    assert session.claims.rotary
    # Four pairs: the frequency of the first is 1, whatever becomes of the others.
    width = session.claims.sizes.fit_head_dim(round(8 / session.claims.rotary.part))
    n_heads = min(session.claims.sizes.n_heads or {1})
    long = replace(
        case,
        B=1,
        n_heads=n_heads,
        head_dim=width,
        L=MANY_POSITIONS,
        S=MANY_POSITIONS,
        variant="plain",
    )
    problem = replace(long, n_kv_heads=1 if session.claims.multi_query else None).problem()
    because = f"the oracle's value for {MANY_POSITIONS} positions"
    expect_close(session(problem).output, session.expected(problem).output, because=because)


@property_of(
    "ROT-1",
    # In half precision the bound may hide the positions; INC-1 judges decoding there.
    replace(
        DECODING, min_L=3, min_S=3, max_length=17, variants=("plain", "grouped"), dtypes=BOUNDED
    ),
    needs=("rotary", "decodes"),
    requires="SHP-1",
    must_reject=("restarts",),
    max_cases=20,
    number=5,
)
def a_cache_continues_the_positions(session: Session, case: Case) -> None:
    """Decoded positions go on where the cache ends, at once and one by one."""
    sequence = DecodedSequence(session, case.problem())
    chunks, start = list[torch.Tensor](), 0
    if session.claims.decodes == "chunks":
        start = 1 + case.seed % (case.L - 1)
        chunks.append(sequence.decode_positions(0, start))
    chunks.append(sequence.decode_rest(start))
    sequence.expect_one_pass(torch.cat(chunks, 1))


@property_of(
    "ROT-1",
    TRAINED,
    needs=("rotary", "gradients"),
    requires="SHP-1",
    must_reject=("ignores_rotary", "nan_gradients"),
    max_cases=24,
    number=6,
)
def gradients_are_rotated_back(session: Session, case: Case) -> None:
    """The gradients of inputs and weights are within the bound, with rotated queries and keys."""
    problem = case.problem()
    assume_finite(session, problem)
    expect_gradients(session, problem, None, "with rotated queries and keys")


@property_of(
    "QKN-1",
    replace(SEVERAL, values=MOST_VALUES),
    needs="qk_norm",
    requires="SHP-1",
    must_reject=("ignores_norm", "norm_over_others", "lopsided"),
)
def normed_heads_give_the_oracles_result(session: Session, case: Case) -> None:
    """Queries and keys are normed over the declared axes, with the declared eps and weight."""
    problem = case.problem()
    assume_answered(session, problem)
    because = f"the oracle's value, with {session.claims.qk_norm}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "QKN-1",
    replace(SEVERAL, masks=("none",), values=("normal", "large")),
    needs="qk_norm",
    requires="SHP-1",
    must_reject=("ignores_norm",),
    number=2,
)
def a_norm_has_an_effect(session: Session, case: Case) -> None:
    """Where a norm changes the exact result by ten times the bound, the result changes too."""
    without = replace(session.claims, qk_norm=None)
    _expect_effect(session, case, without, "the norm of queries and keys has no effect here")


@property_of(
    "QKN-1",
    replace(SEVERAL, layouts=DENSE),
    needs="qk_norm",
    requires="SHP-1",
    must_reject=("no_eps",),
    number=3,
)
def rows_of_zeros_are_finite(session: Session, case: Case) -> None:
    """Queries and keys of zeros give finite results, within the bound."""
    problem = zeroed(case.problem(), "b_q", "b_k")
    assume_finite(session, problem)

    def with_zeros(x: torch.Tensor) -> torch.Tensor:
        rows = (torch.arange(x.shape[1], device=x.device) + case.seed) % 2 == 0
        return x.masked_fill(rows.view(1, -1, 1), 0.0)

    problem = problem.map_inputs(with_zeros)
    output, expected = session(problem).output, session.expected(problem).output
    message = f"{output.code} is not finite, but rows of zeros are normed to zeros"
    expect(bool(output.tensor.isfinite().all()), message, f"assert {output.code}.isfinite().all()")
    expect_close(output, expected, because="the oracle's value, with rows of zeros")


@property_of(
    "QKN-1",
    TRAINED,
    needs=("qk_norm", "gradients"),
    requires="SHP-1",
    must_reject=("ignores_norm", "nan_gradients"),
    max_cases=24,
    number=4,
)
def gradients_have_the_norm(session: Session, case: Case) -> None:
    """The gradients of inputs and weights, those of the norm too, are within the bound."""
    problem = case.problem()
    assume_finite(session, problem)
    expect_gradients(session, problem, None, "with normed queries and keys")


@property_of(
    "ROT-1",
    replace(
        SEVERAL,
        masks=("none",),
        values=("normal",),
        inputs=("self",),
        dtypes=HALF,
        layouts=DENSE,
        variants=("plain",),
        need_weights=(False,),
        max_length=2,
    ),
    needs="rotary",
    requires="SHP-1",
    must_reject=("coarse_frequencies",),
    max_cases=2,  # in a single one, a known-bad answer that is let pass proves nothing
    number=8,
)
def frequencies_are_not_rounded(session: Session, case: Case) -> None:
    """In half precision, angles far from the start are not those of rounded frequencies.

    The bound of each element, which may have rounded cosines, would allow for them.
    """
    assume_modelled(session, case, changed_heads=True)
    sizes, length = session.claims.sizes, FAR_POSITIONS
    if sizes.max_length is not None:
        length = min(length, sizes.max_length)
    far = replace(
        case,
        B=2,
        n_heads=smallest_from(sizes.n_heads or {2}, 2),
        head_dim=sizes.fit_head_dim(64),
        L=length,
        S=length,
    )
    problem = replace(far, n_kv_heads=1 if session.claims.multi_query else None).problem()
    output = session(problem).output
    expect_errors_of_rounding(session, far, problem, output, defects=_rounded_frequencies)


def _rounded_frequencies(graph: RoundingGraph, known: Known) -> Iterator[Direction]:
    """Yield what frequencies that are rounded to the dtype of the inputs do to the output."""
    problem = known.problem
    rounded = TextbookAttention(
        known.claims, problem.config, problem.weights.to(torch.float64), torch.Generator()
    )
    rounded.frequencies = problem.query.dtype
    inputs = (x.double() for x in (problem.query, problem.key, problem.value))
    with torch.no_grad():
        change = rounded(*inputs, is_causal=problem.is_causal).output - graph.output
    dtype = str(problem.query.dtype).removeprefix("torch.")
    more = f"frequencies were {{}} of the way to those that are rounded to {dtype}"
    less = f"frequencies were {{}} of the way from those that are rounded to {dtype}"
    yield Direction({"output": change}, more, less)
