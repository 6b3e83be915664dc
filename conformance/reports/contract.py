"""The contract as text: a page for each clause, an index, and the whole as one Markdown document."""

from __future__ import annotations

import re
import textwrap

from mha.conformance.properties.registry import properties
from mha.spec.clauses import CLAUSES, FAMILIES, Clause

RENEW = "mha spec --markdown > spec/CONTRACT.md"
NO_DIFFERENCE = "None is known."
INTRODUCTION = f"""\
# The contract of multi-head attention

What an implementation of multi-head attention must do, as {len(CLAUSES)} clauses with stable names. They are data in
`spec/clauses/`, and properties in `conformance/properties/` test them. This text is generated from both:
`{RENEW}`.

## The function

```
q, k, v = query W_q^T + b_q, key W_k^T + b_k, value W_v^T + b_v      each split into H heads of width d_k
weights = softmax(q k^T / sqrt(d_k) + mask)                          over the keys, for each head
output  = concat(weights v) W_o^T + b_o                              the heads side by side, in order
```

| | |
|---|---|
| B | items in a batch |
| H | heads (`n_heads`) |
| L | queries of an item |
| S | keys, and values, of an item |
| D | width of the model (`d_model`) |
| d_k | width of a head, D / H |

`query` and `output` are (B, L, D), `key` and `value` (B, S, D), and `weights` (B, H, L, S). A *row* is one query of one
head. A boolean mask is True where the query may attend (the key is *allowed*, otherwise *masked*) and stands for 0 and
-infinity in the formula; an *empty row* has no allowed key. A *context* is weights times values, before W_o.

## How to read a clause

- **MUST**: a violation fails a run. **SHOULD**: it is reported apart. **MAY**: it need not be done, and whoever claims
  to do it is held to it.
- **Equal**, "the same" and "changes nothing" mean equal to the bit where the operations are the same, and elsewhere
  within the bound.
- **Within the bound**: no further from the exact result than rounding explains. The bound is derived, for every
  element, from the inputs and the roundoff of the dtype, and holds for any order of summation (Higham 2002, chapter 3).
  No constant in it is tuned.
- What is **claimed** or **declared** stands in the implementation's `Claims`; what is not claimed is not judged.
"""

_CODE = re.compile(r"(`[^`]*`)")
_REFERENCE = re.compile(r"\b[A-Z]{3}-\d+\b")
_ISSUE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)?#(?P<number>\d+)")


def page(clause_id: str, width: int = 80) -> str:
    """Return all that is known of a clause, as plain text of at most `width` columns; KeyError if there is none."""
    clause = CLAUSES[clause_id]
    parts = [f"{clause.id} ({clause.level}): {clause.title}", _filled(clause.statement, width, "")]
    for heading, text in _sections(clause).items():
        parts.append(f"{heading}\n{_filled(text, width)}")
    tests = _tests(clause_id)
    told = textwrap.indent("\n".join(tests), "    ") if tests else _filled(_untested(clause), width)
    parts.append(f"Properties that test it\n{told}")
    return "\n\n".join(parts)


def index(family: str | None = None) -> str:
    """Return a line for each clause: id, level and title, by family, of all families or of one."""
    blocks = []
    for letters, kind in FAMILIES.items():
        if family in (None, letters):
            members = [clause for clause in CLAUSES.values() if clause.family == letters]
            lines = [f"    {clause.id:<8}{clause.level:<8}{clause.title}" for clause in members]
            blocks.append("\n".join([f"{letters}  {kind.title}. {kind.about}", *lines]))
    return "\n\n".join(blocks)


def document() -> str:
    """Return the whole contract as Markdown, a section for each family, as it stands in spec/CONTRACT.md."""
    contents = [f"- [{letters}: {kind.title}](#{letters.lower()}). {kind.about}" for letters, kind in FAMILIES.items()]
    parts = [INTRODUCTION, "## Families\n\n" + "\n".join(contents) + "\n"]
    for letters, kind in FAMILIES.items():
        parts.append(f'<a id="{letters.lower()}"></a>\n\n## {letters}: {kind.title}\n\n{_marked(kind.about)}\n')
        parts += [_entry(clause) for clause in CLAUSES.values() if clause.family == letters]
    return "\n".join(parts)


def _entry(clause: Clause) -> str:
    """Return a clause's section of the document."""
    lines = [f'<a id="{clause.id.lower()}"></a>', f"### {clause.id} ({clause.level}): {_marked(clause.title)}"]
    lines.append(_marked(clause.statement))
    lines += [f"*{heading}:* {_marked(text)}" for heading, text in _sections(clause).items()]
    links = [f"[`{test}`](../{test.partition(':')[0]})" for test in _tests(clause.id)]
    lines.append("*Properties that test it:* " + (", ".join(links) or _marked(_untested(clause))))
    return "\n\n".join(lines) + "\n"


def _sections(clause: Clause) -> dict[str, str]:
    """Return what is said of a clause besides its statement, by heading."""
    return {
        "Why it matters": clause.why,
        "Where implementations differ": clause.differs or NO_DIFFERENCE,
        "Source": clause.source,
        "Example of a violation": clause.violation,
    }


def _tests(clause_id: str) -> list[str]:
    """Return where the properties of a clause are."""
    tested = properties().get(clause_id, ())
    level = CLAUSES[clause_id].level
    return [
        f"conformance/properties/{p.module}.py: {p.name}" + ("" if p.level == level else f" ({p.level})")
        for p in tested
    ]


def _untested(clause: Clause) -> str:
    return f"None. {clause.deferred}"


def _filled(text: str, width: int, indent: str = "    ") -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _marked(text: str) -> str:
    """Return a text as Markdown: clauses and issues become links, and what is no code is shown as it is."""
    repository = ""

    def issue(match: re.Match[str]) -> str:
        # "owner/name#1, #2": the second number is of the same repository.
        nonlocal repository
        repository = match["repository"] or repository
        return f"[{match[0]}](https://github.com/{repository}/issues/{match['number']})"

    def plain(part: str) -> str:
        part = re.sub(r"([*<\\])", r"\\\1", part)
        part = _REFERENCE.sub(lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in CLAUSES else m[0], part)
        return _ISSUE.sub(issue, part)

    return "".join(part if part.startswith("`") else plain(part) for part in _CODE.split(text))
