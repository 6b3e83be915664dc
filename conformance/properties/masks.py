"""MSK: mask semantics."""

from __future__ import annotations

from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, EMPTY, FLOAT
from mha.conformance.expect import expect, expect_agree, expect_close, expect_equal, expect_raises
from mha.conformance.properties.changes import expect_unread, select_keys, weights_of
from mha.conformance.registry import checks
from mha.conformance.trial import Trial
from mha.spec import to_convention

# Changed inputs would lose a layout; SHP-7 and NUM-1 see to layouts.
DENSE = ("contiguous",)


@checks("MSK-1", Domain(masks=(*BOOLEAN, *FLOAT), min_S=2, layouts=DENSE))
def masked_keys_have_no_influence(attention: Trial, case: Case) -> None:
    problem = case.problem()
    hidden = ~problem.allowed(None).any(1)
    expect_unread(attention, problem, hidden, case.generator, "which the mask hides from this query")


@checks("MSK-2", Domain(masks=(*BOOLEAN, *FLOAT), min_S=2, need_weights=(True,)), needs="returns_weights")
def masked_weights_are_zero(attention: Trial, case: Case) -> None:
    problem = case.problem()
    weights = weights_of(attention(problem))
    leaks = (~problem.allowed(None) & (weights.tensor != 0)).nonzero()
    if len(leaks):
        at = tuple(leaks[0].tolist())
        because = f"key {at[3]} is masked for query {at[2]} of item {at[0]}"
        expect_equal(weights[at], 0.0, because=because)


@checks("MSK-3", Domain(masks=("keys",), min_S=2, layouts=DENSE))
def masking_equals_deleting(attention: Trial, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    kept = problem.mask[0, 0, 0].nonzero().flatten()
    deleted = select_keys(problem, kept).change(mask=None)
    rows = kept if case.inputs == "self" else slice(None)
    bound = attention.answer(problem).output[:, rows]
    seen, expected = attention(problem).output[:, rows], attention(deleted).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what deleting the masked keys gives")


@checks("MSK-4", Domain(masks=("all",)))
def full_mask_equals_none(attention: Trial, case: Case) -> None:
    problem = case.problem()
    bound = attention.answer(problem).output
    seen, expected = attention(problem).output, attention(problem.change(mask=None)).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what no mask gives")


@checks("MSK-5", Domain(masks=BOOLEAN))
def broadcast_mask_equals_expanded(attention: Trial, case: Case) -> None:
    problem = case.problem()
    mask = problem.mask
    assert mask is not None
    heads = case.n_heads if attention.claims.per_head_mask else 1
    expanded = mask.expand(case.B, heads, case.L, case.S)
    forms = {"the mask expanded with stride 0": expanded, "the mask expanded in memory": expanded.contiguous()}
    if mask.shape[:2] == (1, 1):
        forms["the mask without its dimensions of batch and heads"] = mask[0, 0]
    base = attention(problem).output
    for because, form in forms.items():
        expect_equal(attention(problem.change(mask=form)).output, base, because=f"{because} is the same mask")


@checks("MSK-6", Domain(masks=("items", "heads", "full"), regimes=MODERATE, min_S=2, layouts=DENSE))
def mask_entry_acts_on_its_place_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    heads = case.n_heads if case.mask != "items" else 1
    mask = problem.mask.expand(case.B, heads, case.L, case.S).clone()
    spare = (mask & (mask.sum(-1, keepdim=True) > 1)).nonzero()
    if not len(spare):
        return
    entry = spare[int(torch.randint(len(spare), (1,), generator=case.generator))].tolist()
    item, head, row, key = entry
    cut = mask.clone()
    cut[item, head, row, key] = False
    before, after = problem.change(mask=mask), problem.change(mask=cut)
    base, seen = attention(before).output, attention(after).output
    because = f"only the mask entry {tuple(entry)} changed, of another query"
    for other in range(case.B):
        rows = [index for index in range(case.L) if (other, index) != (item, row)]
        if rows:
            expect_equal(seen[other, rows], base[other, rows], because=because)
    answers = attention.answer(before).output, attention.answer(after).output
    must_move = (answers[0].mid - answers[1].mid).abs()[item, row] > (answers[0].rad + answers[1].rad)[item, row]
    moved = seen.tensor[item, row] != base.tensor[item, row]
    expect(
        bool(moved[must_move].all()),
        f"{seen[item, row].code} did not change when the mask hid key {key} from it in head {head}",
        f"assert not torch.equal({seen[item, row].code}, {base[item, row].code})",
    )


@checks("MSK-7", Domain(min_S=2, layouts=DENSE, passes=("bool",)))
def every_position_can_be_masked(attention: Trial, case: Case) -> None:
    problem = case.problem()
    keys = problem.key.shape[1]
    positions = {0, keys - 1, *torch.randint(keys, (2,), generator=case.generator).tolist()}
    for position in sorted(positions):
        hidden = torch.arange(keys, device=problem.query.device) == position
        masked = problem.change(mask=~hidden.view(1, 1, 1, keys))
        rows = hidden.expand(case.B, problem.query.shape[1], keys)
        expect_unread(attention, masked, rows, case.generator, "the one key that the mask hides")


@checks("MSK-8", Domain(masks=EMPTY))
def empty_rows_follow_the_declared_policy(attention: Trial, case: Case) -> None:
    problem = case.problem()
    policy = attention.claims.empty_row
    if policy == "error":
        because = "a row has no allowed key, and the declared policy is 'error'"
        return expect_raises(partial(attention, problem), because=because)
    answer, seen = attention.answer(problem), attention(problem)
    for item, row in answer.empty.any(1).nonzero().tolist():
        because = f"query {row} of item {item} has no allowed key, and the declared policy is {policy!r}"
        expect_close(seen.output[item, row], answer.output[item, row], because=because)
        if seen.weights is not None:
            expect_close(seen.weights[item, :, row], answer.weights[item, :, row], because=because)


@checks("MSK-9", Domain(masks=EMPTY, layouts=DENSE))
def empty_rows_leave_other_rows_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    if attention.claims.empty_row == "error":
        return
    filled, rows = _filled(problem.mask, problem.shape)
    base, seen = attention(problem.change(mask=filled)).output, attention(problem).output
    for item, row in rows:
        expect_equal(seen[item, row], base[item, row], because="only other rows were left without a key")


@checks("MSK-9", Domain(masks=EMPTY, layouts=DENSE, paths=WITH_GRADIENT, regimes=MODERATE), needs="gradients")
def empty_rows_leave_other_gradients_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    if attention.claims.empty_row == "error":
        return
    filled, rows = _filled(problem.mask, problem.shape)
    if not rows:
        return
    others = ([item for item, _ in rows], [row for _, row in rows])
    base, seen = attention.gradients(problem.change(mask=filled), others), attention.gradients(problem, others)
    for name in seen:
        because = "the rows differentiated all have keys, and are the same"
        expect_equal(seen[name], base[name], because=because)


def _filled(mask: torch.Tensor | None, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the mask with its empty rows allowed everything, and the (item, row) pairs that were not empty."""
    assert mask is not None
    empty = ~mask.any(-1, keepdim=True)
    rows = (~empty[:, 0, :, 0]).expand(shape[0], shape[2]).nonzero().tolist()
    return mask | empty, [(item, row) for item, row in rows]


@checks("MSK-11", Domain(masks=("all", *BOOLEAN), causal=(False, True), passes=("bool", "float")))
def additive_and_boolean_masks_agree(attention: Trial, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    additive = problem.change(mask=to_convention(problem.mask, "additive", problem.query.dtype))
    bound = attention.answer(problem).output
    seen, expected = attention(additive).output, attention(problem).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what the boolean form of the mask gives")


@checks("MSK-11", Domain(masks=FLOAT, regimes=MODERATE, min_S=2))
def additive_mask_is_a_bias_on_the_scores(attention: Trial, case: Case) -> None:
    problem = case.problem()
    expected = attention.answer(problem).output
    expect_close(attention(problem).output, expected, because="the mask's finite numbers are added to the scores")


@checks("MSK-12", Domain(layouts=DENSE, regimes=("normal",), passes=("bool",), max_length=5))
def masks_of_a_wrong_shape_are_refused(attention: Trial, case: Case) -> None:
    problem = case.problem()
    sizes = problem.shape
    wrong = [tuple(size + 1 if axis == grown else 1 for axis, size in enumerate(sizes)) for grown in range(4)]
    wrong += [(*sizes[:3], sizes[3] + 1), (1, *sizes), (sizes[3] + 1,)]
    for shape in wrong:
        mask = torch.ones(shape, dtype=torch.bool, device=problem.query.device)
        because = f"a mask of shape {shape} is not broadcastable to (B, H, L, S) = {sizes}"
        expect_raises(partial(attention, problem.change(mask=mask)), because=because)


@checks("MSK-12", Domain(layouts=DENSE, regimes=("normal",), max_length=5), needs="masks")
def masks_of_an_unclaimed_dtype_are_refused(attention: Trial, case: Case) -> None:
    problem = case.problem()
    dtypes = {torch.int64, torch.uint8}
    dtypes |= {torch.bool} - ({torch.bool} if "bool" in attention.claims.masks else set())
    dtypes |= {problem.query.dtype} - ({problem.query.dtype} if "float" in attention.claims.masks else set())
    for dtype in sorted(dtypes, key=str):
        mask = torch.ones(problem.shape, dtype=dtype, device=problem.query.device)
        because = f"a mask of {dtype} is not claimed, so its meaning would be a guess"
        expect_raises(partial(attention, problem.change(mask=mask)), because=because)
