"""The space of cases of a property for one implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes, mask_form
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.variants import as_variant
from mha.spec import Claims

# The inputs of one length, since queries are keys or values.
OF_ONE_LENGTH = ("self", "query_key", "query_value")
# The largest d_model of more than two heads in the scale "wide": the time that weights take grows
# with its square.
LARGEST_D_MODEL = 512
# The largest L = S in the scale "long": a plain implementation holds that many scores squared.
LONGEST_SQUARE = 1025


@dataclass(frozen=True)
class CaseSpace:
    """The cases of a property for one implementation, in one dtype on one device.

    domain: that of the property within the claims.
    longest: the longest L and S.
    """

    domain: Domain
    claims: Claims
    dtype: str
    device: str
    longest: int

    def case(self, row: dict[str, Any]) -> Case:
        """Return the case of a row of levels, adjusted where its levels do not go together.

        Self-attention and square domains have one length: L, unless that is too long. Few queries
        on many keys have no causal flag that would leave them only the first keys. In the scale
        "wide", d_model has a limit. Sizes that are not claimed become the next ones that are.
        """
        domain, claims = self.domain, self.claims
        if domain.square or row["inputs"] in OF_ONE_LENGTH:
            length = self._one_length(row)
            row = row | {"L": length, "S": length}
        if domain.scale == "wide":
            most_heads = max(2, LARGEST_D_MODEL // row["head_dim"])
            row = row | {"n_heads": min(row["n_heads"], most_heads)}
        declared = claims.scores.window
        if declared and declared.form == "count" and row.get("window") and claims.causal:
            # Of functions that count keys, those without a causal flag may see later keys, or not.
            row = row | {"causal": True}
        row = fit_sizes(self._with_claimed_flag(row), claims)
        row = row | mask_form(row["mask"], claims)
        if claims.norm_weights:
            row["norm_weights"] = claims.norm_weights
        variant = row.pop("variant", "plain")
        case = Case(
            **row,
            dtype=self.dtype,
            device=self.device,
            alignment=claims.alignment or "top_left",
            projected=claims.projections,
        )
        return as_variant(case, variant, claims)

    def _with_claimed_flag(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row without causal flag, or without mask, where both do not go together."""
        claims, domain = self.claims, self.domain
        few_queries = domain.scale == "long" and row["inputs"] != "self"
        if few_queries and claims.causal == "top_left" and not claims.always_causal:
            return row | {"causal": False}
        if row["mask"] == "none" or not row["causal"] or domain.combines(claims):
            return row
        if False in domain.causal:
            return row | {"causal": False}
        return row | {"mask": "none"}

    def _one_length(self, row: dict[str, Any]) -> int:
        """Return the length that replaces both L and S of a row."""
        domain, queries, keys = self.domain, int(row["L"]), int(row["S"])
        if domain.scale == "long":
            return min(keys, LONGEST_SQUARE)
        length = queries
        if queries**2 * row["B"] * row["n_heads"] * row["head_dim"] > domain.volume:
            length = min(queries, keys)
        return max(length, domain.min_L, domain.min_S)
