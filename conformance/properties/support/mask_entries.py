"""One entry of a mask is changed: only the row that it belongs to may change, and must (MSK-6)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.harness.assertions import assume, expect, expect_unchanged
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.spec import Claims, Problem

# Of an entry of a mask: its item, head, query and key; 0 where the mask has one for all.
Entry = tuple[int, int, int, int]


def expect_entry_of_its_own_row(session: Session, case: Case) -> None:
    """Without an entry of the mask, its own rows change, and all others stay as they are."""
    mask = _mask_of_own_entries(case)
    problem = case.problem().change(mask=mask)
    entry = _removable_entry(session, problem, case.generator)
    before, after = problem, problem.change(mask=_cut(mask, entry))
    if not bool(_must_change(session, before, after).any()):
        mask = _with_two_keys(mask, entry, session.claims)
        before, after = problem.change(mask=mask), problem.change(mask=_cut(mask, entry))
    base, output = session(before).output, session(after).output
    item, _, query, _ = entry
    own = torch.zeros(mask.shape[0], mask.shape[2], dtype=torch.bool)
    own[item, query] = True
    own = own.expand(case.B, case.L)  # of an entry for all items, or for all queries
    _expect_others_unchanged(session, after, (base, output), ~own, entry)
    must_change = _must_change(session, before, after) & own.unsqueeze(-1).to(case.device)
    unchanged = (must_change & (output.tensor == base.tensor)).nonzero()
    if len(unchanged):
        place = tuple(unchanged[0].tolist())
        _, head, _, key = entry
        message = (
            f"{output[place].code} did not change when key {key} was masked for it in head {head}"
        )
        expect(False, message, f"assert {output[place].code} != {base[place].code}")
    assume(not bool(own.all()), "the entry is of all rows, and no other one could be affected")


def _mask_of_own_entries(case: Case) -> Tensor:
    """Return the mask of a case with an entry for each item, head and query that has its own."""
    problem = case.problem()
    assert problem.mask is not None
    assume(bool({*"BL"} & {*case.mask_axes}), "all queries share one mask")
    axes = {*case.mask_axes, "S"}
    if case.mask == "items":
        axes.discard("H")
    sizes = []
    for axis, size in zip("BHLS", problem.shape, strict=True):
        sizes.append(size if axis in axes else 1)
    mask = problem.mask.expand(sizes).clone()
    if case.seed % 2 and mask.shape[0] > 1:  # the first item may be the longest
        mask[0] = mask.dtype == torch.bool
    return mask


def _expect_others_unchanged(
    session: Session,
    after: Problem,
    outputs: tuple[RecordedTensor, RecordedTensor],
    others: Tensor,
    entry: Entry,
) -> None:
    """Expect some rows, boolean (B, L), of the outputs before and after a change to be equal."""
    base, output = outputs
    expected = session.expected(after).output
    because = f"only the mask entry {entry} changed, and it belongs to another query"
    for item in range(len(others)):
        rows = others[item].nonzero().flatten().tolist()
        if rows:
            bound = partial(expected.__getitem__, (item, rows))
            expect_unchanged(
                session, output[item, rows], base[item, rows], bound=bound, because=because
            )


def _must_change(session: Session, before: Problem, after: Problem) -> Tensor:
    """Return where the outputs of two problems must differ, boolean (B, L, D)."""
    one, other = session.expected(before).output, session.expected(after).output
    return (one.mid - other.mid).abs() > one.rad + other.rad


def _cut(mask: Tensor, entry: Entry) -> Tensor:
    """Return a mask without an entry."""
    cut = mask.clone()
    cut[entry] = _hidden(mask)
    return cut


def _hidden(mask: Tensor) -> float:
    """Return what a mask hides a key with."""
    return False if mask.dtype == torch.bool else -math.inf


def _with_two_keys(mask: Tensor, entry: Entry, claims: Claims) -> Tensor:
    """Return a mask that allows two keys in the row of an entry: its own and the first one.

    Rounding cannot hide what one of two keys adds. Rows that share the entry, and are causal, have
    the first key too. Where the two are the same key, the mask stays as it is.
    """
    item, head, query, key = entry
    row, thinned = mask[item, head, query], mask.clone()
    allowed = row if mask.dtype == torch.bool else row > -math.inf
    first = int(allowed.nonzero()[0])
    if first == key or claims.prefix_masks:
        return mask
    thinned[item, head, query] = _hidden(mask)
    for kept in (first, key):
        thinned[item, head, query, kept] = row[kept]
    return thinned


def _removable_entry(session: Session, problem: Problem, generator: torch.Generator) -> Entry:
    """Draw an entry that allows a key, in a mask whose rows all allow another one too."""
    mask = problem.mask
    assert mask is not None
    allowed = problem.allowed(session.claims.alignment)
    removable = mask if mask.dtype == torch.bool else mask == 0
    # Of rows that share the entry, one may have no other key.
    only_key = allowed & (allowed.sum(-1, keepdim=True) == 1)
    is_needed = only_key.double().sum_to_size(mask.shape) > 0
    is_used = allowed.double().sum_to_size(mask.shape) > 0
    if session.claims.prefix_masks:  # only the last of its row
        allows_next = torch.cat([removable[..., 1:], torch.zeros_like(removable[..., :1])], -1)
        removable = removable & ~allows_next
    places = (removable & is_used & ~is_needed).nonzero()
    assume(len(places) > 0, "every row has only one allowed key")
    drawn = int(torch.randint(len(places), (1,), generator=generator))
    item, head, query, key = places[drawn].tolist()
    return item, head, query, key
