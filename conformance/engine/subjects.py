"""What is judged, as data: the process that decides never has the code, which runs in others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NoReturn, cast

from pydantic import TypeAdapter, ValidationError

from mha.conformance.waivers import shipped_as
from mha.implementations import Inference, Resolved
from mha.implementations.discovery.resolve import original_of
from mha.implementations.inference.rows import Row
from mha.spec import (
    Alibi,
    Claims,
    Implementation,
    Lse,
    Packed,
    QkNorm,
    Rotary,
    Rounding,
    Scores,
    Sizes,
    Window,
)


@dataclass(frozen=True)
class Elsewhere:
    """Stands for an implementation that another process has.

    shipped_as: its own name, if this package ships it.
    """

    name: str
    claims: Claims
    shipped_as: str = ""

    def build(self, *arguments: object, **options: object) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(f"{self.name} is judged in another process, and cannot be built here")


@dataclass(frozen=True)
class Reading:
    """How a class was understood: the fields of `Inference` that are text."""

    rows: list[tuple[str, str, str]]
    declaration: str
    kind: Literal["class", "function"]
    not_covered: list[str]

    def inference(self, implementation: Implementation) -> Inference:
        """Return the same as an inference."""
        rows = tuple(Row(*row) for row in self.rows)
        return Inference(
            cast(Any, implementation), rows, self.declaration, self.kind, tuple(self.not_covered)
        )


@dataclass(frozen=True)
class Subject:
    """What another process found for a target, as data.

    name, claims, shipped_as: as of `Elsewhere`.
    reading: how it was understood, if it was inferred.
    """

    target: str
    name: str
    claims: dict[str, Any]
    shipped_as: str = ""
    reading: Reading | None = None

    @classmethod
    def of(cls, resolved: Resolved) -> Subject:
        """Return what is known of a resolved implementation."""
        implementation, found = resolved.implementation, resolved.inference
        claims = json.loads(json.dumps(asdict(implementation.claims), default=list))
        shipped, reading = shipped_as(original_of(implementation)), None
        if found:
            rows = [(row.topic, row.finding, row.evidence) for row in found.rows]
            reading = Reading(rows, found.declaration, found.kind, list(found.not_covered))
        return cls(resolved.target, implementation.name, claims, shipped, reading)

    def resolved(self) -> Resolved:
        """Return what `mha.implementations.resolve` would, with what cannot be built."""
        given = dict(self.claims)
        for name, kind in RECORDS.items():
            if given[name] is not None:
                given[name] = kind(**given[name])
        claims = Claims(**given)  # which validates its fields, and makes sets of lists
        implementation = cast(Implementation, Elsewhere(self.name, claims, self.shipped_as))
        inference = self.reading.inference(implementation) if self.reading else None
        return Resolved(implementation, self.target, inference)


def _sizes(*, head_dim_pairs: list[list[int]] | None, **given: Any) -> Sizes:
    """Return sizes from JSON, in which pairs are lists."""
    if head_dim_pairs is None:
        return Sizes(head_dim_pairs=None, **given)
    pairs = {(head_dim, d_value) for head_dim, d_value in head_dim_pairs}
    return Sizes(head_dim_pairs=pairs, **given)


def _scores(*, window: dict[str, Any] | None, alibi: dict[str, Any] | None, **given: Any) -> Scores:
    """Return what a call may say about the scores from JSON, in which records are mappings."""
    return Scores(
        window=Window(**window) if window else None,
        alibi=Alibi(**alibi) if alibi else None,
        **given,
    )


# The fields of `Claims` that are records, and what makes each of JSON.
RECORDS: dict[str, Callable[..., Any]] = {
    "sizes": _sizes,
    "rounding": Rounding,
    "scores": _scores,
    "lse": Lse,
    "rotary": Rotary,
    "qk_norm": QkNorm,
    "packed": Packed,
}


def written(chosen: Sequence[Resolved]) -> list[dict[str, Any]]:
    """Return what was resolved as JSON can write it."""
    return [asdict(Subject.of(each)) for each in chosen]


def read(subjects: object) -> list[Resolved]:
    """Return what `written` wrote; raises ValueError for anything else."""
    try:
        found: list[Subject] = _subjects().validate_python(subjects)
        return [each.resolved() for each in found]
    except (ValidationError, TypeError, KeyError) as error:
        raise ValueError(f"a process that judges sent what is no implementation: {error}") from None


@cache
def _subjects() -> TypeAdapter[list[Subject]]:
    return TypeAdapter(list[Subject])
