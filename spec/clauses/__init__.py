"""The clauses of the contract, keyed by id, in the order of the catalogue."""

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from mha.spec.clauses import (
    accuracy,
    causal,
    composition,
    configuration,
    dropout,
    gradients,
    heads,
    masks,
    paths,
    shapes,
    softmax,
    state,
    symmetries,
)
from mha.spec.clauses.clause import Clause, Level

__all__ = ["CLAUSES", "Clause", "Level"]


def _by_id(clauses: Iterable[Clause]) -> Mapping[str, Clause]:
    """Return the clauses keyed by id; raise ValueError if two share one."""
    keyed: dict[str, Clause] = {}
    for clause in clauses:
        if clause.id in keyed:
            raise ValueError(f"two clauses have the id {clause.id}: {keyed[clause.id].title!r} and {clause.title!r}")
        keyed[clause.id] = clause
    return MappingProxyType(keyed)


CLAUSES: Mapping[str, Clause] = _by_id(
    chain(
        configuration.CLAUSES,
        shapes.CLAUSES,
        softmax.CLAUSES,
        masks.CLAUSES,
        causal.CLAUSES,
        paths.CLAUSES,
        heads.CLAUSES,
        symmetries.CLAUSES,
        accuracy.CLAUSES,
        gradients.CLAUSES,
        dropout.CLAUSES,
        state.CLAUSES,
        composition.CLAUSES,
    )
)
