"""The gallery in one half-precision dtype alone: prints the parts of docs/sharpness.md about it.

python docs/gallery_in_half.py bfloat16
python docs/gallery_in_half.py bfloat16 shares
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mha.conformance.engine.judge import judge
from mha.conformance.faults.base import Complete, Correct, implementation_of
from mha.conformance.faults.registry import FAULTS, Fault
from mha.conformance.properties.registry import needs_ranks
from mha.conformance.settings import Settings
from mha.implementations import Resolved
from mha.spec import CLAUSES, Claims, Config, Implementation, Output, Weights

# The clauses whose directed tests see what the bound on each element does not.
DIRECTED = ("NUM-7", "GRD-8")


# Of a defect, in the outputs and gradients of an otherwise correct class.
SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)


class Blend(nn.Module):
    """A correct class, and a share of what a faulty one gives instead."""

    def __init__(self, correct: Any, faulty: Any, share: float) -> None:
        super().__init__()
        self.correct, self.faulty, self.share = correct, faulty, share

    def forward(self, *inputs: Any, **options: Any) -> Output:
        right, wrong = self.correct(*inputs, **options), self.faulty(*inputs, **options)
        weights = None if right.weights is None else self._blended(right.weights, wrong.weights)
        return Output(self._blended(right.output, wrong.output), weights)

    def _blended(self, right: Tensor, wrong: Tensor) -> Tensor:
        return (right.double() + self.share * (wrong.double() - right.double())).to(right.dtype)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights, which both classes have."""
        of_faulty = self.faulty.weight_gradients()
        return {
            name: gradient + of_faulty[name]
            for name, gradient in self.correct.weight_gradients().items()
        }


@dataclass(frozen=True, eq=False)
class Blended:
    """An implementation of `Blend`."""

    faulty: Implementation
    share: float

    @property
    def name(self) -> str:
        """That of the faulty class."""
        return self.faulty.name

    @property
    def claims(self) -> Claims:
        """Those of the faulty class, without what a blend does not do."""
        never = {
            "decodes": False,
            "decodes_ragged": False,
            "cache_edits": (),
            "composes": (),
            "lse": None,
        }
        return replace(self.faulty.claims, **never)

    def build(self, config: Config, weights: Weights, **options: Any) -> Blend:
        """Build both classes."""
        base: type[nn.Module] = (
            Complete if issubclass(getattr(self.faulty, "cls", Complete), Complete) else Correct
        )
        correct = implementation_of(base, self.faulty.claims)
        built = (each.build(config, weights, **options) for each in (correct, self.faulty))
        return Blend(*built, self.share)


def fails(implementation: Implementation, clauses: Collection[str], dtype: str) -> bool:
    """Return whether an implementation fails one of the clauses in a dtype, when judged quickly."""
    settings = Settings(profile="quick", dtypes=(dtype,), strict=True)
    resolved = Resolved(implementation, "")
    verdicts = (
        judge(resolved, clause, dtype, "cpu", settings, diagnosed=False) for clause in clauses
    )
    return any(verdict.blocked_by or verdict.status in ("fail", "refused") for verdict in verdicts)


def own_clauses(dtype: str) -> dict[type, dict[str, Fault]]:
    """Return the faulty classes that give wrong answers and claim the dtype, with the faults of
    each clause.
    """
    own: dict[type, dict[str, Fault]] = {}
    for fault in FAULTS:
        numerical = CLAUSES[fault.clause].kind == "answers" and not needs_ranks(fault.clause)
        if numerical and dtype in fault.implementation.claims.dtypes:
            own.setdefault(fault.cls, {})[fault.clause] = fault
    return own


def print_shares(dtype: str, part: int = 0, parts: int = 1) -> None:
    """Print, for each faulty class, the smallest share of its defect that its own clauses and NUM-7
    still fail.
    """
    for clauses in list(own_clauses(dtype).values())[part::parts]:
        fault, smallest = next(iter(clauses.values())), "-"
        if any(clause.startswith("INC") for clause in clauses):
            continue
        for share in SHARES:
            if not fails(Blended(fault.implementation, share), (*clauses, "NUM-7"), dtype):
                break
            smallest = f"{share:g}"
        print(f"{smallest}\t{fault.name} ({', '.join(clauses)})", flush=True)


def main(dtype: str) -> None:
    """Judge each faulty class that claims the dtype by its own clauses about answers, then by the
    directed tests.
    """
    own = own_clauses(dtype)
    found: dict[str, list[str]] = {"its own clauses": [], "NUM-7 or GRD-8": [], "none of these": []}
    for clauses in own.values():
        fault = next(iter(clauses.values()))
        tried = {"its own clauses": tuple(clauses), "NUM-7 or GRD-8": DIRECTED}
        place = next(
            (place for place, names in tried.items() if fails(fault.implementation, names, dtype)),
            "none of these",
        )
        found[place].append(f"{fault.name} ({', '.join(clauses)})")
        print(place, found[place][-1], file=sys.stderr, flush=True)
    print(f"{len(own)} faulty classes give wrong answers and claim {dtype}.")
    for place, names in found.items():
        print(
            f"- Caught by {place}: {len(names)}"
            + ("" if place == "its own clauses" else f": {'; '.join(names)}")
        )


if __name__ == "__main__":
    if sys.argv[2:3] == ["shares"]:
        print_shares(sys.argv[1], *map(int, sys.argv[3:]))
    else:
        main(sys.argv[1])
