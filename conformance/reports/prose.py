"""Prose of clauses, fixes and messages with its markup rendered: code, clauses, issues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from markupsafe import Markup, escape

from mha.spec.clauses import CLAUSES

# Code in backticks; a clause; and an issue, as in "owner/name#1, #2", where the second number
# belongs to the same repository.
_MARKUP = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|\b(?P<clause>[A-Z]{3}-\d+)\b"
    r"|(?:(?P<repository>[\w.-]+/[\w.-]+)|(?<!\w))#(?P<number>\d+)\b"
)
# Returns the address of a clause from its id; empty where it has none.
Address = Callable[[str], str]


class Part(NamedTuple):
    """A piece of prose; target: the id of a clause, or the address of an issue."""

    kind: Literal["text", "code", "clause", "issue"]
    text: str
    target: str = ""


def parts(text: str) -> Iterator[Part]:
    """Yield the pieces of a text, in order.

    >>> [part.kind for part in parts("see `x`, MSK-1 and a/b#1")]
    ['text', 'code', 'text', 'clause', 'text', 'issue']
    """
    end = 0
    repository = ""
    for found in _MARKUP.finditer(text):
        repository = found["repository"] or repository
        part = _part(found, repository)
        if part is None:
            continue
        if found.start() > end:
            yield Part("text", text[end : found.start()])
        yield part
        end = found.end()
    if end < len(text):
        yield Part("text", text[end:])


def _part(found: re.Match[str], repository: str) -> Part | None:
    """Return the piece that was found; None where it only looks like one."""
    if found["code"]:
        return Part("code", found["code"])
    if found["clause"]:
        return Part("clause", found[0], found[0]) if found[0] in CLAUSES else None
    if not repository:
        return None
    return Part("issue", found[0], f"https://github.com/{repository}/issues/{found['number']}")


def prose_to_markdown(text: str, address: Address) -> str:
    """Return a text as Markdown.

    >>> prose_to_markdown("see MSK-1, *not* `x*y`", lambda clause: f"#{clause.lower()}")
    'see [MSK-1](#msk-1), \\\\*not\\\\* `x*y`'
    """
    written = ""
    for part in parts(text):
        target = address(part.target) if part.kind == "clause" else part.target
        if part.kind == "code":
            written += f"`{part.text}`"
        elif target:
            written += f"[{part.text}]({target})"
        else:
            written += re.sub(r"([*<\\])", r"\\\1", part.text)
    return written


def prose_to_html(text: str, address: Address) -> Markup:
    """Return a text as HTML, with all else in it escaped.

    >>> str(prose_to_html("1 < 2 in `MSK-1`, and MSK-2", lambda clause: f"#{clause}"))
    '1 &lt; 2 in <code>MSK-1</code>, and <a href="#MSK-2">MSK-2</a>'
    """
    written = Markup()
    for part in parts(text):
        target = address(part.target) if part.kind == "clause" else part.target
        if part.kind == "code":
            written += Markup("<code>{}</code>").format(part.text)
        elif target:
            written += Markup('<a href="{}">{}</a>').format(target, part.text)
        else:
            written += escape(part.text)
    return written
