"""What is required and what is advice, and why."""

from __future__ import annotations

from generated.links import path_of_clause
from mha.conformance.reports.prose import prose_to_markdown
from mha.spec import CLAUSES


def tables() -> str:
    """Return the clauses that are not required of everyone, with the reasons."""
    parts = []
    for level, heading in (("SHOULD", "Advice (SHOULD)"), ("MAY", "If it is claimed (MAY)")):
        parts += [f"## {heading}\n", "| clause | | why it matters |", "|---|---|---|"]
        for clause in CLAUSES.values():
            if clause.level == level:
                why = prose_to_markdown(clause.why, path_of_clause).replace("|", "\\|")
                link = f"[{clause.id}]({path_of_clause(clause.id)})"
                parts.append(f"| {link} | {clause.title} | {why} |")
        parts.append("")
    return "\n".join(parts)
