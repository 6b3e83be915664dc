"""Kinds of subject: correct attention that refuses whatever it does not claim."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mha.conformance import Report
from mha.conformance.cases.claimed import claimed_axes
from mha.conformance.cases.domain import Domain
from mha.conformance.faults.base import Complete
from mha.conformance.properties.registry import properties
from mha.spec import Claims, Config, Options, Output, Sizes, Weights
from support.judging import judged_throughout

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
        if mask is not None and is_causal and not claims.combines_causal:
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


def left_out_by_claims(claims: Claims) -> dict[str, str]:
    """Return the clauses that claims leave out in float32, each with the claim that is missing."""
    left_out: dict[str, str] = {}
    for clause, members in properties().items():
        reasons = [each.within(claims, "float32") for each in members]
        missing = [reason for reason in reasons if not isinstance(reason, Domain)]
        if len(missing) == len(members):
            left_out[clause] = missing[0].topic or str(missing[0])
    return left_out


def claims_as_text(claims: Claims) -> str:
    """Return the claims that differ from `Claims()`, as code."""
    default = Claims()
    shown = []
    for field in fields(Claims):
        value = getattr(claims, field.name)
        if value != getattr(default, field.name):
            shown.append(f"{field.name}={_literal(value)}")
    return f"`{', '.join(shown)}`"


def _literal(value: object) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "()"
    return repr(value) if not isinstance(value, Sizes) else "Sizes(...)"
