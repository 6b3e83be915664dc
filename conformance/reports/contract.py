"""The contract as text: a page for one clause, an index, and the whole contract as one Markdown
document.
"""

from __future__ import annotations

import re
import textwrap

from mha.conformance.properties.source_index import Listed, listing
from mha.conformance.reports.layout import INDENT, wrapped
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause

REGENERATE = "mha spec --markdown > spec/CONTRACT.md"
NO_DIFFERENCE = "No differences are known."
PROPERTIES = "conformance/properties"
WIDTH = 80
_KINDS = "\n".join(f"  - *{kind}*: {meaning}" for kind, meaning in KINDS.items())
INTRODUCTION = f"""\
# The contract of multi-head attention

What an implementation of multi-head attention must do, in {len(CLAUSES)} clauses with stable ids. They are data in
[`spec/clauses/`](clauses), and the properties in [`{PROPERTIES}/`](../{PROPERTIES}) test them. This file
is generated from both, by `{REGENERATE}`.

## The function

```
q, k, v = query W_q^T + b_q, key W_k^T + b_k, value W_v^T + b_v      each split into H heads of width d_k
weights = softmax(q k^T / sqrt(d_k) + mask)                          over the keys, for each head
output  = concat(weights v) W_o^T + b_o                              the heads side by side, in order
```

| Symbol | Meaning |
|---|---|
| B | items in the batch |
| H | heads (`n_heads`) |
| L | queries per item |
| S | keys, and values, per item |
| D | width of the model (`d_model`) |
| d_k | width of one head, D / H unless `d_head` is given |

`query` and `output` have shape (B, L, D), `key` and `value` (B, S, D), and `weights` (B, H, L, S).

- A *row* is one query of one head: its scores, or its weights, for all keys.
- A *boolean mask* is True where the query may attend to the key. The key is *allowed* there, and *masked* elsewhere;
  in the formula, these stand for 0 and -infinity. An *additive mask* holds numbers that are added to the scores.
- An *empty row* has no allowed key.
- A *context* is weights times values, before W_o.

## How to read a clause

The levels are those of RFC 2119.

- **MUST**: a violation fails the run. **SHOULD**: a violation is reported, but fails only a strict run. **MAY**: the
  capability is optional, and the clause applies to implementations that claim it.
- Reports count three kinds of clause separately:
{_KINDS}
- **Equal**, "the same" and "changes nothing" mean bit for bit where the operations are the same, and within the bound
  elsewhere.
- **Within the bound** means no further from the exact result than rounding explains. The bound is derived for each
  element, from the inputs and the unit roundoff of the dtype, and holds for any order of summation (Higham 2002,
  chapter 3). No constant in it is tuned.
- The **oracle** is a float64 evaluation of the formula above that also computes this bound.
- An implementation **claims** or **declares** what it can do in its `Claims`. What it does not claim is not tested.
- A **known bug**, given as a source, has been seen in real implementations.
"""

_CODE = re.compile(r"(`[^`]*`)")
_REFERENCE = re.compile(r"\b[A-Z]{3}-\d+\b")
_ISSUE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)?#(?P<number>\d+)")


def page(clause_id: str, width: int = WIDTH) -> str:
    """Return everything about one clause as plain text of at most `width` columns; raise KeyError
    for an unknown id.

    >>> print(page("MSK-4").partition("\\n")[0])
    MSK-4 (MUST): An all-True mask equals no mask
    """
    clause = CLAUSES[clause_id]
    parts = [
        wrapped(f"{clause.id} ({clause.level}): {clause.title}", width, ""),
        wrapped(clause.statement, width, ""),
    ]
    sections = {"Kind": f"{clause.kind.capitalize()}: {KINDS[clause.kind]}", **_sections(clause)}
    parts += [f"{heading}\n{wrapped(text, width, INDENT)}" for heading, text in sections.items()]
    parts.append(f"Tested by\n{_listing(clause)}")
    return "\n\n".join(parts)


def index(family: str | None = None, width: int = WIDTH) -> str:
    """Return one line per clause (id, level, title, kind), grouped by family; of one family only,
    if given.

    >>> print(index("INC"))
    INC: Incremental decoding
    Decoding with a cache of keys and values that grows token by token.
        INC-1   MAY     Cached decoding equals one causal pass
        INC-2   MAY     Chunks against a cache equal one causal pass
        INC-3   MAY     An edited cache decodes what it then holds
    """
    blocks = []
    for letters, kind in FAMILIES.items():
        if family in (None, letters):
            members = [clause for clause in CLAUSES.values() if clause.family == letters]
            lines = [
                wrapped(
                    f"{clause.title}{_kind(clause)}",
                    width,
                    f"    {clause.id:<8}{clause.level:<8}",
                    " " * 20,
                )
                for clause in members
            ]
            blocks.append(
                "\n".join([f"{letters}: {kind.title}", wrapped(kind.about, width, ""), *lines])
            )
    return "\n\n".join(blocks)


def document() -> str:
    """Return the whole contract as Markdown, one section per family: the content of
    spec/CONTRACT.md.
    """
    contents = [
        f"- [{letters}: {kind.title}](#{letters.lower()}). {kind.about}"
        for letters, kind in FAMILIES.items()
    ]
    parts = [INTRODUCTION, "## Families\n\n" + "\n".join(contents) + "\n"]
    for letters, kind in FAMILIES.items():
        parts.append(
            f'<a id="{letters.lower()}"></a>\n\n## {letters}:'
            f" {kind.title}\n\n{_markdown(kind.about)}\n"
        )
        parts += [_entry(clause) for clause in CLAUSES.values() if clause.family == letters]
    return "\n".join(parts)


def _entry(clause: Clause) -> str:
    """Return the section of the document on one clause."""
    heading = f"{clause.id} ({clause.level}, {clause.kind}): {_markdown(clause.title)}"
    lines = [f'<a id="{clause.id.lower()}"></a>', f"### {heading}"]
    lines.append(_markdown(clause.statement))
    lines += [f"*{heading}:* {_markdown(text)}" for heading, text in _sections(clause).items()]
    links = [
        f"[`{_label(each, clause)}`](../{PROPERTIES}/{each.module}.py)"
        for each in _properties(clause)
    ]
    lines.append(f"*Tested by:* {', '.join(links)}")
    return "\n\n".join(lines) + "\n"


def _kind(clause: Clause) -> str:
    """Return the kind of a clause in brackets, if it is not that of most clauses."""
    return "" if clause.kind == "answers" else f" ({clause.kind})"


def _sections(clause: Clause) -> dict[str, str]:
    """Return the texts that explain a clause, by heading."""
    return {
        "Why it matters": clause.why,
        "Example of a violation": clause.violation,
        "Usual fix": clause.fix,
        "How libraries differ": clause.differs or NO_DIFFERENCE,
        "Source": clause.source,
    }


def _properties(clause: Clause) -> tuple[Listed, ...]:
    """Return the properties that test a clause, in order."""
    return listing().get(clause.id, ())


def _label(tested: Listed, clause: Clause) -> str:
    """Return a property's name, with its level where that differs from the level of the clause."""
    return (
        tested.name if tested.level in (None, clause.level) else f"{tested.name} ({tested.level})"
    )


def _listing(clause: Clause) -> str:
    """Return the properties of a clause as indented lines, under the files that define them."""
    by_file: dict[str, list[str]] = {}
    for each in _properties(clause):
        by_file.setdefault(f"{PROPERTIES}/{each.module}.py", []).append(_label(each, clause))
    lines = [
        line
        for file, names in by_file.items()
        for line in (file, *(f"    {name}" for name in names))
    ]
    return textwrap.indent("\n".join(lines), "    ")


def _markdown(text: str) -> str:
    """Return a text as Markdown: clause ids and issues become links, special characters outside
    code are escaped.
    """
    repository = ""

    def issue(match: re.Match[str]) -> str:
        # In "owner/name#1, #2" the second number belongs to the same repository.
        nonlocal repository
        repository = match["repository"] or repository
        return f"[{match[0]}](https://github.com/{repository}/issues/{match['number']})"

    def plain(part: str) -> str:
        part = re.sub(r"([*<\\])", r"\\\1", part)
        part = _REFERENCE.sub(
            lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in CLAUSES else m[0], part
        )
        return _ISSUE.sub(issue, part)

    return "".join(part if part.startswith("`") else plain(part) for part in _CODE.split(text))
