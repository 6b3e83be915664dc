"""What another convention and a fault have in common: the author is asked, with both answers."""

from __future__ import annotations

from mha.implementations.adapters.names import words_of
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate

# In the names of parameters of a class after T5, whose initial weights make up for a scale.
RELATIVE_WORDS = frozenset({"relative", "rel"})
RELATIVE_NAMES = frozenset({"position_bias", "pos_bias"})


def require_scale(candidate: Candidate, code: str) -> None:
    """Raise ImplementationError, with both answers, for a kernel that may leave scales to callers.

    One that forgets the scale computes the same. A class has no such callers, and is judged, unless
    it is one after T5: see `require_scale_of_class`.

    code: of the kernel.
    """
    if candidate.formula.scale == "none":
        _ask(candidate, code, "since its callers scale the queries", "function")


def require_scale_of_class(candidate: Candidate) -> None:
    """Raise ImplementationError, with both answers, for a class that may be one after T5.

    That is one without a scale whose parameters speak of relative positions.
    """
    if candidate.formula.scale == "none" and has_relative_positions(candidate):
        _ask(candidate, candidate.label, "as in T5, whose initial weights make up for it", "class")


def has_relative_positions(candidate: Candidate) -> bool:
    """Return whether the constructor, or a call, has a parameter about relative positions."""
    declared = candidate.declared
    for name in (*declared.constructor_parameters, *declared.forward_parameters):
        if name in RELATIVE_NAMES or RELATIVE_WORDS & {*words_of(name)}:
            return True
    return False


def _ask(candidate: Candidate, code: str, reason: str, kind: str) -> None:
    meant = candidate.claiming(scale=1.0).declared.line(code)
    raise ImplementationError(
        f"{candidate.label} does not scale its scores. Is that meant, {reason}? Then declare it"
        f" below the {kind}, and judge that: {meant}. If not, multiply the scores by d_k ** -0.5;"
        f" this declaration fails until then: {candidate.declared.line(code)}"
    )
