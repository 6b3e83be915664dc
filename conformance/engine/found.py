"""What a process that judges is asked to import, and what it has found. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha.implementations import Resolved


@dataclass(frozen=True)
class Request:
    """What a process is asked to import.

    targets: in the order in which they are imported.
    declarations: as of `Workers`.
    is_heard: whether what it prints meanwhile is shown, as by one of several processes.
    as_declared: whether the declarations are followed, so that nothing is inferred.
    """

    targets: tuple[str, ...]
    declarations: Mapping[str, str] | None = None
    is_heard: bool = False
    as_declared: bool = False


@dataclass(frozen=True)
class Found:
    """What the targets name, as `mha.conformance.engine.subjects` has it, by name.

    torch_changes, broken: as of `mha.conformance.results.Report`.
    notes: a line for each registered implementation that "all" names, and that cannot be used.
    why_declared: why a target is as `Workers.declarations` says, if it is.
    """

    chosen: dict[str, Resolved]
    torch_changes: tuple[str, ...]
    broken: dict[str, str]
    notes: tuple[str, ...]
    why_declared: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Found:
        """Return what a process has found; raises ValueError for what none says."""
        from mha.conformance.engine import subjects

        chosen = {each.implementation.name: each for each in subjects.read(message["found"])}
        changes, notes = map(str, message["torch_changes"]), map(str, message["notes"])
        broken = {str(name): str(error) for name, error in dict(message["broken"]).items()}
        why_declared = str(message["why_declared"])
        return cls(chosen, tuple(changes), broken, tuple(notes), why_declared)
