"""What another convention and a fault have in common: the author is asked, with both answers."""

from __future__ import annotations

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate


def require_scale(candidate: Candidate, code: str) -> None:
    """Raise ImplementationError, with both answers, for a kernel that may leave scales to callers.

    One that forgets the scale computes the same. A class has no such callers, and is judged.

    code: of the kernel.
    """
    if candidate.formula.scale != "none":
        return
    meant = candidate.claiming(scale=1.0).declared.line(code)
    raise ImplementationError(
        f"{candidate.label} does not scale its scores. Is that meant, since its callers scale the"
        f" queries? Then declare it below the function, and judge that: {meant}. If not, multiply"
        " the scores by d_k ** -0.5; this declaration fails until then:"
        f" {candidate.declared.line(code)}"
    )
