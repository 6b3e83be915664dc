"""Kinds of subject: correct attention that refuses whatever it does not claim.

As a program it prints docs/coverage.md: which clauses are judged for each kind, and why the others
are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mha.conformance import Report
from mha.conformance.cases.claimed import claimed_axes
from mha.conformance.faults.base import Complete
from mha.spec import CLAUSES, Claims, Config, Options, Output, Sizes, Weights
from support.judging import judged_throughout

ALL, SOME, NONE = "●", "◐", "·"
INTRODUCTION = f"""# What is judged of which kind of subject

Made by `python -m support.kinds`, in the quick profile and float32. Of each family of clauses, \
{ALL} all are judged,
{SOME} some, {NONE} none; the number counts clauses. One is left out only where no call that is \
claimed can state it:
cases are made causal, masks are restricted to the claimed axes, one tensor takes the place of \
three, and contexts of
one-hot values show weights that are not returned.
"""
BY_REASON = """
## What is left out, by what it needs

Of any of these kinds: by the claim that is missing, or in words.
"""
OF_KINDS = """
## What the kinds claim
"""
PADDING_ONLY: dict[str, Any] = {"per_head_mask": False, "per_query_mask": False}
KINDS = {
    "GPT": Claims(
        cross_attention=False,
        always_causal=True,
        masks=(),
        returns_weights=False,
        dropout=True,
        composes={"autocast"},
    ),
    "GPT with padding": Claims(
        cross_attention=False, always_causal=True, returns_weights=False, **PADDING_ONLY
    ),
    "encoder with padding": Claims(cross_attention=False, causal=None, **PADDING_ONLY),
    "padding and a causal flag": Claims(**PADDING_ONLY),
    "cross-attention to a memory": Claims(
        cross_attention="memory", causal=None, returns_weights=False, **PADDING_ONLY
    ),
    "cross-attention that is always causal": Claims(always_causal=True),
    "one mask for the batch": Claims(
        per_item_mask=False, per_head_mask=False, returns_weights=False
    ),
    "one row of keys for all": Claims(per_item_mask=False, **PADDING_ONLY),
    "additive masks": Claims(masks={"float"}, per_head_mask=False, causal=None),
    "key padding and a mask": Claims(per_head_mask=False, joint_masks=False),
    "causal flag or mask": Claims(
        masks={"bool", "float"}, causal_with_mask=False, returns_weights=False
    ),
    "masks of four dimensions": Claims(masks={"bool", "float"}, mask_ranks={4}),
    "no masks": Claims(masks=(), causal=None, returns_weights=False),
    "causal flag without masks": Claims(masks=()),
    "no key bias": Claims(bias={"qvo", False}),
    "sizes of a kernel": Claims(
        sizes=Sizes(head_dims={32, 64}, length_multiple=16, max_length=512), returns_weights=False
    ),
    "four heads": Claims(sizes=Sizes(n_heads={4})),
}


class ClaimedOnly(Complete):
    """Refuses a call that is not claimed, whatever is valid otherwise."""

    claims: Claims

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        options = Options(**given)
        for reason in self.not_claimed(query, key, value, options.mask, options.is_causal):
            raise NotImplementedError(f"not claimed: {reason}")
        output, weights, _ = super().forward(query, key, value, **given)
        return Output(output, weights if self.claims.returns_weights else None)

    def not_claimed(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> list[str]:
        """Return what the call has that is not claimed."""
        claims, reasons = self.claims, []
        if not claims.cross_attention and not query is key is value:
            reasons.append("cross-attention")
        if claims.cross_attention == "memory" and key is not value:
            reasons.append("key and value that differ")
        if mask is not None and is_causal and not (claims.causal_with_mask or claims.always_causal):
            reasons.append("a causal call with a mask")
        if is_causal and not claims.causal:
            reasons.append("a causal call")
        if claims.always_causal and not is_causal:
            reasons.append("a call that is not causal")
        if mask is not None:
            reasons += self.not_claimed_of(mask)
        lengths = query.shape[1], key.shape[1]
        sizes = claims.sizes.refused(
            n_heads=self.config.n_heads, head_dim=self.config.head_dim, lengths=lengths
        )
        return [*reasons, sizes] if sizes else reasons

    def not_claimed_of(self, mask: Tensor) -> list[str]:
        """Return what a mask has that is not claimed."""
        reasons = []
        if ("bool" if mask.dtype == torch.bool else "float") not in self.claims.masks:
            reasons.append(f"a mask of dtype {mask.dtype}")
        if mask.ndim not in self.claims.mask_ranks:
            reasons.append(f"a mask of {mask.ndim} dimensions")
        if not self.claims.joint_masks and mask.ndim == 4 and mask.dtype == torch.bool:
            padding, shared = mask.flatten(1, 2).any(1)[:, None, None], mask.any(0)
            if not torch.equal(mask, padding & shared):
                reasons.append("a mask that is not a padding mask and another one for all items")
        for name, size, first in zip(
            "BHLS"[-mask.ndim :], mask.shape, range(mask.ndim), strict=True
        ):
            same = size == 0 or torch.equal(mask, mask.narrow(first, 0, 1).expand_as(mask))
            if name not in claimed_axes(self.claims) and not same:
                reasons.append(f"a mask that differs along {name}")
        return reasons


@dataclass(frozen=True, eq=False)
class Subject:
    """A kind of subject as an implementation."""

    name: str
    claims: Claims
    cls: type[ClaimedOnly] = ClaimedOnly

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> ClaimedOnly:
        """Build the module, which knows what is claimed."""
        if config.bias not in self.claims.bias:
            raise NotImplementedError(f"not claimed: bias={config.bias!r}")
        module = self.cls(config, weights.to(dtype, device))
        module.claims = self.claims
        return module


def judge(kind: str) -> Report:
    """Judge a kind of subject on every clause, in float32."""
    return judged_throughout(Subject(kind, KINDS[kind]))


def row_of(kind: str, report: Report) -> str:
    """Return a kind's row of the table: whether all, some or none of each family are judged."""
    families: dict[str, list[bool]] = defaultdict(list)
    for verdict in report.verdicts:
        families[verdict.clause.partition("-")[0]].append(verdict.status != "not_claimed")
    count = sum(map(sum, families.values()))
    return f"| {kind} | {count} | {' | '.join(map(sign_of, families.values()))} |"


def sign_of(family: list[bool]) -> str:
    """Return whether all, some or none of the clauses of a family are judged."""
    if all(family):
        return ALL
    return SOME if any(family) else NONE


def left_out_of(report: Report) -> dict[str, list[str]]:
    """Return the clauses that are not judged, by the reason that reports count them under."""
    left_out: dict[str, list[str]] = defaultdict(list)
    for verdict in report.verdicts:
        if verdict.status == "not_claimed":
            left_out[verdict.topic or verdict.message].append(verdict.clause)
    return left_out


def _claims_as_text(claims: Claims) -> str:
    """Return the claims that differ from `Claims()`, as code."""
    default = Claims()
    changed = {field.name: getattr(claims, field.name) for field in fields(Claims)}
    shown = [
        f"{name}={_literal(value)}"
        for name, value in changed.items()
        if value != getattr(default, name)
    ]
    return f"`{', '.join(shown)}`"


def _literal(value: object) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "()"
    return repr(value) if not isinstance(value, Sizes) else "Sizes(...)"


def page(reports: Mapping[str, Report]) -> str:
    """Return docs/coverage.md."""
    families = list(dict.fromkeys(clause.partition("-")[0] for clause in CLAUSES))
    head = [
        f"| kind | of {len(CLAUSES)} | {' | '.join(families)} |",
        f"|---|---:|{':-:|' * len(families)}",
    ]
    rows = [row_of(kind, report) for kind, report in reports.items()]
    claims = [f"- {kind}: {_claims_as_text(KINDS[kind])}" for kind in reports]
    merged: dict[str, dict[str, None]] = defaultdict(dict)
    for report in reports.values():
        for reason, clauses in left_out_of(report).items():
            merged[reason].update(dict.fromkeys(clauses))
    in_order = list(CLAUSES)
    left_out = [
        f"- {reason}: {', '.join(sorted(merged[reason], key=in_order.index))}"
        for reason in sorted(merged)
    ]
    return "\n".join([INTRODUCTION, *head, *rows, BY_REASON, *left_out, OF_KINDS, *claims, ""])


if __name__ == "__main__":
    print(page({kind: judge(kind) for kind in KINDS}), end="")
