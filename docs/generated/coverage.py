"""What is judged of which kind of class: a matrix of kinds and families."""

from __future__ import annotations

from html import escape

from generated.links import path_of_clause
from mha.conformance.properties.registry import properties
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES
from support.kinds import KINDS, claims_as_text, left_out_by_claims

ALL, SOME, NONE = "●", "◐", "·"


def matrix() -> str:
    """Return the matrix, what is left out by the reason, and what each kind claims."""
    parts = [_matrix()]
    parts.append("\n## What is left out, by the claim that it needs\n")
    by_reason: dict[str, dict[str, None]] = {}
    for claims in KINDS.values():
        for clause, reason in left_out_by_claims(claims).items():
            by_reason.setdefault(reason, {})[clause] = None
    order = list(CLAUSES)
    for reason in sorted(by_reason):
        clauses = sorted(by_reason[reason], key=order.index)
        links = ", ".join(f"[{clause}]({path_of_clause(clause)})" for clause in clauses)
        parts.append(f"- {reason}: {links}")
    parts.append("\n## What the kinds claim\n")
    parts += [f"- {kind}: {claims_as_text(claims)}" for kind, claims in KINDS.items()]
    return "\n".join(parts) + "\n"


def _matrix() -> str:
    """Return the table, as HTML, whose cells say what is left out."""
    heads = []
    for letters, family in FAMILIES.items():
        heads.append(f'<th title="{escape(family.title)}">{letters}</th>')
    count = f"<th>of {len(CLAUSES)}</th>"
    rows = [f"<tr><th>kind</th>{count}{''.join(heads)}</tr>"]
    for kind, claims in KINDS.items():
        left_out = left_out_by_claims(claims)
        cells = [_cell(letters, left_out) for letters in FAMILIES]
        judged = len(properties()) - len(left_out)
        rows.append(f"<tr><th>{kind}</th><td>{judged}</td>{''.join(cells)}</tr>")
    lines = "\n".join(rows)
    return f'<div class="matrix"><table>\n{lines}\n</table></div>\n'


def _cell(family: str, left_out: dict[str, str]) -> str:
    """Return the cell of a family; left_out: clauses that are not judged, with the reason."""
    clauses = [clause for clause in properties() if clause.startswith(family)]
    missing = [clause for clause in clauses if clause in left_out]
    sign = SOME
    if not missing:
        sign = ALL
    elif len(missing) == len(clauses):
        sign = NONE
    why = "; ".join(f"{clause}: {left_out[clause]}" for clause in missing)
    return f'<td title="{escape(why)}">{sign}</td>'
