"""What a shell completes: clauses and families, and names of implementations or files."""

from __future__ import annotations

from glob import escape, glob


def complete_clause(incomplete: str) -> list[str]:
    """Return the families and clauses that begin like this, in any case."""
    from mha.spec.clauses import CLAUSES, FAMILIES

    return [word for word in (*FAMILIES, *CLAUSES) if word.startswith(incomplete.upper())]


def complete_target(incomplete: str) -> list[str]:
    """Return the registered names and the Python files that begin like this."""
    from importlib.metadata import entry_points

    names = sorted({point.name for point in entry_points(group="mha.implementations")})
    files = sorted(glob(f"{escape(incomplete)}*.py"))
    return [name for name in names if name.startswith(incomplete)] + files
