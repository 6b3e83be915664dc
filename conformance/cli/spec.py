"""`mha spec`: the contract, a family or a clause of it as text."""

from __future__ import annotations

import shutil
from difflib import get_close_matches

from mha.conformance.reports.contract import document, index, page
from mha.spec.clauses import CLAUSES, FAMILIES

# In columns; longer lines are hard to read.
WIDEST = 100


def contract_text(word: str | None, *, markdown: bool = False) -> str:
    """Return the page of a clause, the index of a family or of all, or the contract as Markdown.

    word: a clause or a family, in any case. Raises ValueError for anything else.
    """
    if markdown:
        if word is not None:
            raise ValueError(
                f"--markdown prints the whole contract: leave out {word!r}, or leave out --markdown"
            )
        return document().removesuffix("\n")
    width = min(shutil.get_terminal_size().columns, WIDEST)
    if word is None:
        return f"{index(width=width)}\n\n{len(CLAUSES)} clauses. To read one: mha spec MSK-1"
    wanted = word.strip().upper()
    if wanted in FAMILIES:
        return index(wanted, width)
    if wanted in CLAUSES:
        return page(wanted, width)
    near = get_close_matches(wanted, [*CLAUSES, *FAMILIES], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`mha spec` lists them"
    raise ValueError(
        f"{word!r} is neither a clause, such as MSK-1, nor a family, such as MSK; {hint}"
    )
