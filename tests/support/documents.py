"""The code blocks of the README and the guide, which follow a comment that says what they are."""

from __future__ import annotations

import re

from support.folders import ROOT

BLOCK = re.compile(r"<!-- (.+?) -->\n```\w*\n(.*?)```", re.DOTALL)


def blocks(file: str) -> list[tuple[str, str]]:
    """Return the labelled code blocks of a file in the repository, each with its label."""
    return BLOCK.findall((ROOT / file).read_text(encoding="utf-8"))


def in_six_digits(text: str) -> str:
    """Round long numbers: the last digits of a float32 result differ between processors."""
    return re.sub(r"-?\d+\.\d{6,}", lambda number: f"{float(number[0]):.6g}", text)
