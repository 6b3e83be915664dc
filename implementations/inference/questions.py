"""What another convention and a fault have in common: the author is asked, with both answers."""

from __future__ import annotations

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate


def require_convention(candidate: Candidate, constructor: str) -> None:
    """Raise ImplementationError for scores without a scale, and for no output projection.

    Either may be meant, as in T5 and in BERT's self-attention, or forgotten. Where both are
    missing, the contract is another one, and that is judged.

    constructor: the code of what is judged.
    """
    is_unscaled, is_unprojected = candidate.formula.scale == "none", _is_unprojected(candidate)
    if (candidate.shown and not candidate.is_kernel) or is_unscaled == is_unprojected:
        return
    if is_unscaled:
        fact = "does not scale its scores"
        reason = "since its weights contain the scale, as in T5"
        if candidate.is_kernel:
            reason = "since its callers scale the queries"
        meant, mend = candidate.claiming(scale=1.0), "multiply the scores by d_k ** -0.5"
    else:
        fact, reason = "has no output projection", "since W_o is elsewhere, as in BERT"
        projections = {**candidate.declared.parameters}
        del projections["w_o"]
        meant, mend = candidate.declaring(parameters=projections), "project what it returns"
    below = "the function" if candidate.is_kernel else "the class"
    raise ImplementationError(
        f"{candidate.label} {fact}. Is that meant, {reason}? Then declare it below {below}, and"
        f" judge that: {meant.declared.line(constructor)}. If not, {mend}; this declaration fails"
        f" until then: {candidate.declared.line(constructor)}"
    )


def _is_unprojected(candidate: Candidate) -> bool:
    return not (candidate.is_kernel or candidate.formula.projected)
