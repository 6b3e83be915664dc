"""Text of others, such as names and messages in a report, made harmless wherever it is shown."""

from __future__ import annotations

import html
import re

# In characters; the JSON has the whole of a longer text.
LONGEST_TEXT, LONGEST_NAME = 4000, 80
# The runner of GitHub Actions takes these for commands: the first at the start of a line, which may
# be a line that was wrapped, and the second anywhere.
COMMAND = re.compile(r"(?<!\S):(?=:[A-Za-z])|#(?=#\[)")
# What Markdown takes for markup outside of code, and at the start of a line only.
CODE = re.compile(r"(`[^`]+`)")
MARKUP = re.compile(r"([\\`*_\[\]#@|~])")
START = re.compile(r"^(\d*)([-+=.)])")


def visible(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text with characters escaped that something would act on, cut if it is too long.

    A terminal or a browser acts on control characters, and GitHub Actions on lines that look like
    its commands.

    >>> visible("\\x1b[2Jcleared")
    '\\\\x1b[2Jcleared'
    >>> visible("::error::no")
    '\\\\x3a:error::no'
    """
    escaped = ""
    for character in text[:longest]:
        if character == "\n" or character.isprintable():
            escaped += character
        else:
            escaped += character.encode("unicode_escape").decode()
    escaped = COMMAND.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped)
    if len(text) > longest:
        return f"{escaped} ... ({len(text):,} characters)"
    return escaped


def visible_line(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text as it can be shown within a line, which nothing in it ends.

    >>> visible_line("wrong\\nCONFORMS")
    'wrong CONFORMS'
    """
    return visible(text.replace("\n", " "), longest)


def visible_name(name: str) -> str:
    """Return a name as it can be shown within a line."""
    return visible_line(name, LONGEST_NAME)


def markdown_line(text: str) -> str:
    """Return a text in one line of Markdown, with all markup escaped but code in backticks.

    >>> markdown_line("see `x_1`\\n# CONFORMS")
    'see `x_1` \\\\# CONFORMS'
    >>> markdown_line("~~~"), markdown_line("- a"), markdown_line("1. a")
    ('\\\\~\\\\~\\\\~', '\\\\- a', '1\\\\. a')
    """
    line = html.escape(text.replace("\n", " ").strip(), quote=False)
    parts = CODE.split(line)
    parts[::2] = [MARKUP.sub(r"\\\1", part) for part in parts[::2]]
    return START.sub(r"\1\\\2", "".join(parts))
