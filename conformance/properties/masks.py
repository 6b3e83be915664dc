"""MSK: mask semantics; empty rows (MSK-8, MSK-9) and additive masks (MSK-11) have modules of their own."""

from __future__ import annotations

import math
from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, TYPICAL, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT, make_mask
from mha.conformance.cases.transforms import as_claimed, as_wide_as_claimed, select_keys
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
)
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_unread, weights_of
from mha.spec.bounds import Ball
from mha.spec.dtypes import TRAITS, torch_dtype


def _part(ball: Ball, index: tuple[int, list[int]]) -> Ball:
    return ball[index]


@property_of(
    "MSK-1",
    Domain(masks=(*BOOLEAN, *FLOAT), min_S=2, layouts=DENSE, values=(*TYPICAL, "low")),
    must_reject=("unmasked", "noise"),
    min_rejection_rate=0.3,
)
def masked_keys_have_no_influence(session: Session, case: Case) -> None:
    problem = case.problem()
    hidden = ~problem.allowed(None).any(1)
    expect_unread(session, problem, hidden, case.generator, "which the mask hides from this query")


@property_of(
    "MSK-2",
    Domain(masks=(*BOOLEAN, *FLOAT), min_S=2, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("unmasked",),
)
def masked_weights_are_zero(session: Session, case: Case) -> None:
    problem = case.problem()
    weights = weights_of(session(problem))
    leaks = (~problem.allowed(None) & (weights.tensor != 0)).nonzero()
    if len(leaks):
        at = tuple(leaks[0].tolist())
        because = f"key {at[3]} is masked for query {at[2]} of item {at[0]}"
        expect_equal(weights[at], 0.0, because=because)


@property_of("MSK-3", Domain(min_S=2, layouts=DENSE), needs="masks", must_reject=("unmasked", "noise"))
def masking_equals_deleting(session: Session, case: Case) -> None:
    whole = case.problem()
    allowed = make_mask("keys", whole.shape, None, case.generator)
    assert allowed is not None
    problem = as_claimed(session.claims, whole, allowed.to(case.device))
    kept = allowed[0, 0, 0].nonzero().flatten()
    deleted = select_keys(whole, kept)
    rows = kept if any(problem.query is whole for whole in (problem.key, problem.value)) else slice(None)
    bound = session.expected(problem).output[:, rows]
    seen, expected = session(problem).output[:, rows], session(deleted).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what deleting the masked keys gives")


@property_of("MSK-4", Domain(masks=("all",)))
def full_mask_equals_none(session: Session, case: Case) -> None:
    problem = case.problem()
    bound = session.expected(problem).output
    seen, expected = session(problem).output, session(problem.change(mask=None)).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what no mask gives")


@property_of("MSK-5", Domain(masks=(*BOOLEAN, *FLOAT), causal=BOTH))
def broadcast_mask_equals_expanded(session: Session, case: Case) -> None:
    problem = case.problem()
    mask = problem.mask
    assert mask is not None
    expanded = as_wide_as_claimed(mask, problem, session.claims)
    forms = {
        "with stride 0": expanded,
        "in memory": expanded.contiguous(),
        "in memory, keys before queries": expanded.mT.contiguous().mT,
        "as a part of a larger tensor": torch.nn.functional.pad(expanded, (0, 1))[..., :-1],
    }
    base, bound = session(problem).output, lambda: session.expected(problem).output
    for form, same in forms.items():
        seen = session(problem.change(mask=same)).output
        expect_unchanged(session, seen, base, bound=bound, because=f"the mask expanded {form} is the same mask")


@property_of(
    "MSK-5", Domain(masks=("keys", "queries", "head_keys", "heads", "query_bias", "head_bias"), causal=BOTH), number=2
)
def mask_of_fewer_dimensions_is_broadcast(session: Session, case: Case) -> None:
    problem = case.problem()
    mask = problem.mask
    assert mask is not None
    forms = [mask[0]]
    if mask.shape[1] == 1:
        forms.append(mask[0, 0])
    if mask.shape[1:3] == (1, 1):
        forms.append(mask[0, 0, 0])
    base, bound = session(problem).output, session.expected(problem).output
    for form in forms:
        seen = session(problem.change(mask=form)).output
        because = f"what the mask of shape {tuple(mask.shape)} gives, here of shape {tuple(form.shape)}"
        expect_agree(seen, base, bounds=(bound, bound), because=because)


@property_of(
    "MSK-6",
    Domain(masks=("items", "heads", "full"), causal=BOTH, values=MODERATE, min_S=2, layouts=DENSE),
    must_reject=("unmasked", "noise"),
)
def mask_entry_acts_on_its_place_alone(session: Session, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    heads = case.n_heads if case.mask != "items" else 1
    mask = problem.mask.expand(case.B, heads, case.L, case.S).clone()
    allowed = problem.change(mask=mask).allowed(session.claims.causal)
    # One key of a row with several, for all heads where the mask is shared by them.
    spare = (mask & (allowed & (allowed.sum(-1, keepdim=True) > 1))[:, :heads]).nonzero()
    assume(len(spare) > 0, "every row has one key only")
    entry = spare[int(torch.randint(len(spare), (1,), generator=case.generator))].tolist()
    item, head, row, key = entry
    cut = mask.clone()
    cut[item, head, row, key] = False
    before, after = problem.change(mask=mask), problem.change(mask=cut)
    base, seen = session(before).output, session(after).output
    because = f"only the mask entry {tuple(entry)} changed, of another query"
    answers = session.expected(before).output, session.expected(after).output
    for other in range(case.B):
        rows = [index for index in range(case.L) if (other, index) != (item, row)]
        if rows:
            kept, old = seen[other, rows], base[other, rows]
            bound = partial(_part, answers[1], (other, rows))
            expect_unchanged(session, kept, old, bound=bound, because=because)
    must_move = (answers[0].mid - answers[1].mid).abs()[item, row] > (answers[0].rad + answers[1].rad)[item, row]
    moved = seen.tensor[item, row] != base.tensor[item, row]
    expect(
        bool(moved[must_move].all()),
        f"{seen[item, row].code} did not change when the mask hid key {key} from it in head {head}",
        f"assert not torch.equal({seen[item, row].code}, {base[item, row].code})",
    )


@property_of(
    "MSK-7", Domain(min_S=2, layouts=DENSE), needs="masks", must_reject=("unmasked", "noise"), min_rejection_rate=0.3
)
def every_position_can_be_masked(session: Session, case: Case) -> None:
    problem = case.problem()
    keys = problem.key.shape[1]
    positions = {0, keys - 1, *torch.randint(keys, (2,), generator=case.generator).tolist()}
    for position in sorted(positions):
        hidden = torch.arange(keys, device=problem.query.device) == position
        masked = as_claimed(session.claims, problem, ~hidden.view(1, 1, 1, keys))
        rows = hidden.expand(case.B, problem.query.shape[1], keys)
        expect_unread(session, masked, rows, case.generator, "the one key that the mask hides")


@property_of(
    "MSK-10",
    Domain(masks=BOOLEAN, values=MODERATE, inputs=("cross",), min_S=2, layouts=DENSE),
    must_reject=("unmasked",),
)
def nan_behind_a_mask_stays_there(session: Session, case: Case) -> None:
    problem = case.problem()
    hidden = ~problem.allowed(None).any(1)
    gone, read = hidden.all(1), ~hidden.any(1)
    assume(bool(gone.any() or read.any()), "every key is masked for some queries only")
    base, bound = session(problem).output, lambda: session.expected(problem).output
    for name in ("key", "value"):
        whole = getattr(problem, name)
        for number in (math.nan, math.inf, -math.inf):
            if bool(gone.any()):
                seen = session(problem.change(**{name: whole.masked_fill(gone.unsqueeze(-1), number)})).output
                because = f"only masked keys have {number} in their {name}"
                expect_unchanged(session, seen, base, bound=bound, because=because)
        items = read.any(1)
        if bool(items.any()):
            seen = session(problem.change(**{name: whole.masked_fill(read.unsqueeze(-1), math.nan)})).output
            reached = seen.tensor[items].isnan().flatten(1).any(1)
            message = f"{seen.code} has no NaN, though every query may attend to a key whose {name} is NaN"
            expect(bool(reached.all()), message, f"assert {seen.code}.isnan().any()")


@property_of(
    "MSK-12", Domain(layouts=DENSE, values=("normal",), max_length=5), needs="masks", must_reject=("never_refuses",)
)
def masks_of_a_wrong_shape_are_refused(session: Session, case: Case) -> None:
    problem = case.problem()
    batch, heads, queries, keys = sizes = problem.shape
    shapes = [tuple(size + 1 if axis == grown else 1 for axis, size in enumerate(sizes)) for grown in range(4)]
    shapes += [(*sizes[:3], keys + 1), (*sizes[:3], keys + 2), (*sizes[:3], keys - 1), (1, *sizes), (keys + 1,)]
    # What other libraries take, which here would be read as something else.
    shapes += [(batch, keys), (batch, queries, keys), (batch * heads, queries, keys), (queries, keys, batch)]
    for shape in shapes:
        fits = zip(reversed(shape), reversed(sizes), strict=False)
        if 0 in shape or (len(shape) <= 4 and all(size in (1, full) for size, full in fits)):
            continue
        for form in sorted(session.claims.masks):
            dtype = torch.bool if form == "bool" else problem.query.dtype
            mask = torch.ones(shape, dtype=dtype, device=problem.query.device)
            because = f"a {form} mask of shape {shape} is not broadcastable to (B, H, L, S) = {sizes}"
            expect_raises(partial(session, problem.change(mask=mask)), because=because)


# A vector of a kernel has up to 16 numbers.
@property_of(
    "MSK-12",
    Domain(masks=FLOAT, causal=BOTH, layouts=DENSE, values=MODERATE, min_S=16, max_length=33),
    max_cases=24,
    number=2,
)
def masks_of_another_precision_are_added_or_refused(session: Session, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    own, companions = problem.query.dtype, TRAITS[case.dtype].companions
    assume(bool(companions), f"no other dtype is promoted with {case.dtype}")
    dtype = torch_dtype(companions[case.seed % 2])
    other = problem.mask.to(dtype)
    answer = session.expected(problem.change(mask=other.to(own)))
    assume(not bool(answer.empty.any()), "in the other precision a row is empty")
    try:
        seen = session(problem.change(mask=other), dtypes=(own, torch.promote_types(own, dtype))).output
    except CallRaised:
        return  # as for any other dtype
    expect_close(seen, answer.output, because=f"a mask of {other.dtype} is added to the scores, or refused")


@property_of(
    "MSK-12",
    Domain(layouts=DENSE, values=("normal",), max_length=5),
    needs="masks",
    must_reject=("never_refuses",),
    number=3,
)
def masks_of_an_unclaimed_dtype_are_refused(session: Session, case: Case) -> None:
    problem = case.problem()
    dtypes = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
    dtypes |= set() if "bool" in session.claims.masks else {torch.bool}
    dtypes |= set() if "float" in session.claims.masks else {problem.query.dtype}
    for dtype in sorted(dtypes, key=str):
        mask = torch.ones(problem.shape, dtype=dtype, device=problem.query.device)
        because = f"a mask of {dtype} is not claimed, so its meaning would be a guess"
        expect_raises(partial(session, problem.change(mask=mask)), because=because)
