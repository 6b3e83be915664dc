"""MSK: what a mask means; MSK-8, -9 and -11 are in `mask_edges`, -12 and -14 in `invalid_masks`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import claimed_axes
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, FLOAT, make_mask
from mha.conformance.cases.transforms import (
    as_claimed,
    as_wide_as_claimed,
    select_keys,
    weights_in,
    with_weights_as_output,
)
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_equal,
    expect_unchanged,
)
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.mask_entries import expect_entry_of_its_own_row
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    assume_unquantised,
    expect_rows_unchanged,
    hidden_pairs,
    refuses,
    weights_of,
    with_other,
)
from mha.conformance.properties.support.unread_keys import expect_unread
from mha.spec import Problem

NOTHING_HIDDEN = "no key is masked"


@property_of(
    "MSK-1",
    Domain(masks=(*BOOLEAN, *FLOAT), causal_as_mask=True, min_S=2, layouts=DENSE),
    must_reject=("unmasked", "lopsided"),
)
def masked_keys_have_no_influence(session: Session, case: Case) -> None:
    """Replacing a masked key and value with any finite numbers changes no output."""
    _expect_masked_unread(session, case)


@property_of(
    "MSK-1",
    Domain(masks=BOOLEAN, causal_as_mask=True, min_S=2, layouts=DENSE, values=("low",)),
    must_reject=("unmasked",),
    max_cases=12,
    number=2,
)
def masked_keys_have_no_influence_on_low_scores(session: Session, case: Case) -> None:
    """This holds where all other scores are lower than what often fills masked scores."""
    _expect_masked_unread(session, case)


def _expect_masked_unread(session: Session, case: Case) -> None:
    problem = case.problem()
    hidden = hidden_pairs(session, problem).all(1)
    expect_unread(session, problem, hidden, case.generator, "which are masked for")


@property_of(
    "MSK-2",
    Domain(masks=(*BOOLEAN, *FLOAT), causal_as_mask=True, min_S=2, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("unmasked",),
)
def masked_weights_are_zero(session: Session, case: Case) -> None:
    """The weight of a masked key is exactly 0."""
    problem = case.problem()
    hidden = hidden_pairs(session, problem)
    assume(bool(hidden.any()), NOTHING_HIDDEN)
    weights = weights_of(session(problem))
    leaks = (hidden & (weights.tensor != 0)).nonzero()
    if len(leaks):
        at = tuple(leaks[0].tolist())
        because = f"key {at[3]} is masked for query {at[2]} of item {at[0]}"
        expect_equal(weights[at], 0.0, because=because)


@property_of(
    "MSK-2",
    Domain(masks=(*BOOLEAN, *FLOAT), causal_as_mask=True, min_S=2, values=MODERATE, max_length=9),
    needs="returns_weights=False",
    must_reject=("unmasked",),
    number=2,
)
def masked_keys_add_nothing_to_the_context(session: Session, case: Case) -> None:
    """Where no weights are returned, one-hot values show that the weight of a masked key is 0."""
    problem = with_weights_as_output(case, session.claims)
    hidden = hidden_pairs(session, problem)
    assume(bool(hidden.any()), NOTHING_HIDDEN)
    output = session(problem).output
    leaks = (hidden & (weights_in(output.tensor, problem) != 0)).nonzero()
    if len(leaks):
        item, head, query, key = leaks[0].tolist()
        because = f"each value is one-hot, and key {key} is masked for query {query} in head {head}"
        expect_equal(
            output[item, query, head * problem.config.head_dim + key], 0.0, because=because
        )


@property_of(
    "MSK-3", Domain(min_S=2, layouts=DENSE), needs="masks", must_reject=("unmasked", "lopsided")
)
def masking_equals_deleting(session: Session, case: Case) -> None:
    """Masking keys equals deleting them."""
    whole = case.problem()
    axes = claimed_axes(session.claims)
    if session.claims.rotary:
        axes = axes.replace("S", "")  # the last keys only: others would move those after them
    allowed = make_mask("keys", whole.shape, None, case.generator, axes)
    assert allowed is not None
    problem = as_claimed(session.claims, whole, allowed.to(case.device))
    loses_rows = problem.is_self or problem.query is problem.value
    assume(
        loses_rows or not problem.is_causal, "without a key, the causal mask would be another one"
    )
    assume_answered(session, problem)
    kept = allowed[0, 0, 0].nonzero().flatten()
    deleted = select_keys(whole, kept)
    # A query that is the same tensor as the key or the value loses these rows too.
    rows = kept if loses_rows else slice(None)
    output, expected = session(problem).output[:, rows], session(deleted).output
    bound = session.bound_of(problem, (slice(None), rows))
    expect_agree(output, expected, bound, because="the result with the masked keys deleted")


@property_of("MSK-4", Domain(masks=("all",)))
def all_true_mask_equals_no_mask(session: Session, case: Case) -> None:
    """A mask that is True everywhere equals no mask."""
    problem = case.problem()
    output, expected = session(problem).output, session(problem.change(mask=None)).output
    expect_agree(output, expected, session.bound_of(problem), because="the result without a mask")


@property_of("MSK-5", Domain(masks=(*BOOLEAN, *FLOAT), causal=BOTH))
def broadcast_mask_equals_expanded(session: Session, case: Case) -> None:
    """A broadcast mask equals the same mask expanded; in any memory layout, to the bit."""
    problem = case.problem()
    mask = problem.mask
    assert mask is not None
    expanded = as_wide_as_claimed(mask, problem, session.claims)
    base, bound = session(problem).output, session.bound_of(problem)

    def result_for(same: Tensor) -> RecordedTensor:
        return session(problem.change(mask=same)).output

    # Code may be selected by the shape of a mask: another shape gives the same result within the
    # bound.
    contiguous = result_for(expanded.contiguous())
    forms = {
        "and contiguous": contiguous,
        "along some axes": result_for(_expanded_along_some_axes(mask, expanded, case.seed)),
        # `torch.where` lays out scores as its mask, and so a sum may be in another order.
        "with keys before queries in memory": result_for(expanded.mT.contiguous().mT),
    }
    for form, output in forms.items():
        because = f"the result for the same mask, here expanded {form}"
        expect_agree(output, base, bound, because=because)
    layouts = {
        "with stride 0": expanded,
        "as a slice of a larger tensor": torch.nn.functional.pad(expanded, (0, 1))[..., :-1],
    }
    for form, same in layouts.items():
        because = f"the result for the same mask, here expanded {form} instead of contiguous"
        expect_unchanged(session, result_for(same), contiguous, bound=bound, because=because)


def _expanded_along_some_axes(mask: Tensor, expanded: Tensor, seed: int) -> Tensor:
    """Return a mask expanded along some axes: at least one, and not all if there are several.

    seed: its bits say which of the axes.
    """
    axes = [axis for axis in range(3) if expanded.shape[axis] > mask.shape[axis]]
    chosen = seed % max(1, 2 ** len(axes) - 2) + 1
    sizes = list(mask.shape)
    for place, axis in enumerate(axes):
        if chosen >> place & 1:
            sizes[axis] = expanded.shape[axis]
    return mask.expand(sizes)


@property_of(
    "MSK-5",
    Domain(masks=("keys", "queries", "head_keys", "heads", "query_bias", "head_bias"), causal=BOTH),
    number=2,
)
def mask_of_fewer_dimensions_is_broadcast(session: Session, case: Case) -> None:
    """A mask of shape (H, L, S), (L, S) or (S,) equals the same mask of four dimensions."""
    problem = case.problem()
    mask = problem.mask
    assert mask is not None
    forms = [mask[0]]
    if mask.shape[1] == 1:
        forms.append(mask[0, 0])
    if mask.shape[1:3] == (1, 1):
        forms.append(mask[0, 0, 0])
    ranks = session.claims.mask_ranks
    forms = [form for form in forms if form.ndim in ranks]
    assume(bool(forms), f"needs the claim mask_ranks of less than 4, not {set(ranks)}")
    base, bound = session(problem).output, session.bound_of(problem)
    for form in forms:
        output = session(problem.change(mask=form)).output
        because = (
            f"the result for the mask of shape {tuple(mask.shape)} (instead of {tuple(form.shape)})"
        )
        expect_agree(output, base, bound, because=because)


@property_of(
    "MSK-6",
    Domain(masks=("items", "heads", "full"), causal=BOTH, values=MODERATE, min_S=2, layouts=DENSE),
    must_reject=("lopsided",),
)
def mask_entry_affects_only_its_own_row(session: Session, case: Case) -> None:
    """Mask entries differ per item, query and head, and each affects only its own row."""
    expect_entry_of_its_own_row(session, case)


@property_of(
    "MSK-7", Domain(min_S=2, layouts=DENSE), needs="masks", must_reject=("unmasked", "lopsided")
)
def every_position_can_be_masked(session: Session, case: Case) -> None:
    """Masking works at every position, including the first and last key."""
    problem = case.problem()
    keys = problem.key.shape[1]
    positions = {0, keys - 1, *torch.randint(keys, (2,), generator=case.generator).tolist()}
    if session.claims.prefix_masks:
        positions = {keys - 1}
    for position in sorted(positions):
        hidden = torch.arange(keys, device=problem.query.device) == position
        masked = as_claimed(session.claims, problem, ~hidden.view(1, 1, 1, keys))
        if refuses(session, masked):
            continue
        rows = hidden & hidden_pairs(session, masked).all(1)
        expect_unread(session, masked, rows, case.generator, "the only key that is masked for")


@property_of(
    "MSK-10",
    Domain(masks=BOOLEAN, values=MODERATE, inputs=("cross",), min_S=2, layouts=DENSE),
    must_reject=("unmasked",),
)
def nan_of_masked_keys_does_not_reach_the_output(session: Session, case: Case) -> None:
    """NaN or infinity in a masked key or value does not reach the output."""
    problem = case.problem()
    hidden = hidden_pairs(session, problem).all(1)
    masked = hidden.all(1)
    assume(bool(masked.any()), "no key is masked for all queries")
    base = session(problem).output
    for name, tensor in problem.distinct(("key", "value")).items():
        # Where the query is the same tensor, the rows of masked keys have NaN of their own.
        own = masked if tensor is problem.query else torch.zeros_like(hidden[..., 0])
        rows = (hidden | ~masked.unsqueeze(1)).all(-1) & ~own
        for number in (math.nan, math.inf, -math.inf):
            output = session(_filled(problem, tensor, masked, number)).output
            because = f"only masked keys have {number} in their {name}"
            expect_rows_unchanged(session, problem, (base, output), rows, because)


NAN = Domain(masks=("none", *BOOLEAN), causal=BOTH, values=MODERATE, layouts=DENSE)


@property_of("MSK-13", replace(NAN, min_S=2), must_reject=("hides_nan",))
def nan_of_allowed_keys_shows(session: Session, case: Case) -> None:
    """NaN in an allowed key, and NaN or infinity in an allowed value, show where it is seen."""
    problem, key, sees = _one_key(session, case)
    several = problem.allowed(session.claims.alignment).sum(-1) > 1
    if problem.key is problem.query:  # all scores of that query are NaN
        several[..., key : key + 1] = False
    rows = {"key": (sees & several).any(1), "value": sees.any(1)}
    if problem.key is problem.value:
        rows["key"] = rows["value"]
    _expect_shown(session, problem, key, rows)


@property_of("MSK-13", NAN, must_reject=("hides_nan",), level="SHOULD", number=2)
def nan_of_the_only_allowed_key_shows(session: Session, case: Case) -> None:
    """NaN in the only allowed key shows."""
    problem, key, sees = _one_key(session, case)
    assume(problem.key is not problem.value, "NaN in the key is NaN in the value")
    only = problem.allowed(session.claims.alignment).sum(-1) == 1
    _expect_shown(session, problem, key, {"key": (sees & only).any(1)})


def _one_key(session: Session, case: Case) -> tuple[Problem, int, Tensor]:
    """Return a problem, a key of it, and boolean (B, H, L): which queries see that key."""
    assume_unquantised(session)
    problem = case.problem()
    assume_answered(session, problem)
    key = int(torch.randint(case.S, (), generator=case.generator))
    return problem, key, problem.allowed(session.claims.alignment)[..., key]


def _expect_shown(session: Session, problem: Problem, key: int, rows: dict[str, Tensor]) -> None:
    """Expect numbers that are not finite, in a key or value, to show in the output.

    rows: by the name of the input, boolean (B, L), where they must.
    """
    assume(any(bool(each.any()) for each in rows.values()), "no query may attend to the key")
    place = torch.arange(problem.key.shape[1], device=problem.key.device) == key
    place = place.expand(len(problem.key), -1)
    for name, tensor in problem.distinct(tuple(rows)).items():
        # An infinite key may have a score of -infinity, and so no weight.
        numbers = (math.nan, math.inf, -math.inf) if name == "value" else (math.nan,)
        for number in numbers:
            output = session(_filled(problem, tensor, place, number)).output
            hidden = (rows[name] & output.tensor.isfinite().all(-1)).nonzero()
            if len(hidden):
                row = output[tuple(hidden[0].tolist())]
                message = (
                    f"{row.code} is finite, but that query may attend to key {key}, whose {name} is"
                    f" {number}"
                )
                expect(False, message, f"assert not {row.code}.isfinite().all()")


def _filled(problem: Problem, tensor: Tensor, places: Tensor, number: float) -> Problem:
    """Put a number into a tensor at some positions, boolean (B, S), wherever it is an input."""
    return with_other(problem, tensor, tensor.masked_fill(places.unsqueeze(-1), number))
