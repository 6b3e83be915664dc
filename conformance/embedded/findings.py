"""What a run knows of each clause, and the verdicts that it makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mha.conformance.embedded.cases import KernelCase
from mha.conformance.results import Status, Verdict
from mha.spec.clauses import CLAUSES


@dataclass
class Judged:
    """What is known of one clause in one dtype.

    examples: how many cases were tried.
    margin: the largest error/bound of them.
    message, diagnosis, case: of the first failure.
    failed_at: its number.
    decisive: whether it keeps the kernel from conforming.
    not_expressed: why the kernel cannot be given such a case.
    """

    examples: int = 0
    margin: float = 0.0
    seconds: float = 0.0
    message: str = ""
    diagnosis: str = ""
    case: str | None = None
    failed_at: int | None = None
    decisive: bool = True
    not_expressed: str = ""

    @property
    def status(self) -> Status:
        """The status of its verdict."""
        if self.message:
            return "fail"
        return "pass" if self.examples else "not_claimed"


@dataclass
class Findings:
    """What is known of each clause, by clause and dtype."""

    found: dict[tuple[str, str], Judged] = field(default_factory=dict)

    @property
    def has_unasked_claims(self) -> bool:
        """Whether the kernel cannot be given any case of a clause that its claims name."""
        for judged in self.found.values():
            if judged.not_expressed and judged.status == "not_claimed":
                return True
        return False

    def of(self, clause: str, case: KernelCase) -> Judged:
        """Return what is known of a clause in the dtype of a case."""
        return self.found.setdefault((clause, case.dtype), Judged())

    def has_failed(self, clause: str, case: KernelCase) -> bool:
        """Return whether a clause has failed in the dtype of a case."""
        known = self.found.get((clause, case.dtype))
        return known is not None and bool(known.message)

    @property
    def decided(self) -> bool:
        """Whether something keeps the kernel from conforming."""
        return any(known.message and known.decisive for known in self.found.values())

    def fail(
        self,
        clause: str,
        case: KernelCase,
        message: str,
        diagnosis: str = "",
        *,
        decisive: bool = True,
    ) -> None:
        """Note a failure, unless one is known that decides as much."""
        known = self.of(clause, case)
        if known.message and (known.decisive or not decisive):
            return
        known.message, known.diagnosis, known.decisive = message, diagnosis, decisive
        known.examples = max(1, known.examples)
        known.case, known.failed_at = repr(case), known.examples

    def verdicts(self, label: str, device: str) -> Iterator[Verdict]:
        """Yield the verdict of each clause, in the order of the contract.

        label: the name of the kernel.
        """
        order = {clause: number for number, clause in enumerate(CLAUSES)}
        for clause, dtype in sorted(self.found, key=lambda key: (order[key[0]], key[1])):
            judged = self.found[clause, dtype]
            yield Verdict(
                implementation=label,
                clause=clause,
                level=CLAUSES[clause].level,
                dtype=dtype,
                device=device,
                status=judged.status,
                required=judged.decisive,
                examples=judged.examples,
                cases_to_failure=judged.failed_at,
                margin=judged.margin,
                message=judged.message or judged.not_expressed,
                diagnosis=judged.diagnosis,
                case=judged.case,
                seconds=judged.seconds,
            )
