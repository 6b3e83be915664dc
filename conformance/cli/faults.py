"""`mha faults`: the judge judged on the gallery of faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from mha.conformance.faults import kill_matrix
from mha.conformance.faults.registry import implementations
from mha.conformance.settings import PROFILES


def judge_the_judge(
    names: Sequence[str],
    seed: int,
    profile: str,
    *,
    every_clause: bool,
    json: Path | None,
    markdown: Path | None,
    svg: Path | None,
) -> Iterator[tuple[str, bool]]:
    """Yield the lines to print, and whether each tells of a fault that is caught, or of none; write the files.

    Raises ValueError for what is not known or cannot be written, the latter before anything is judged if possible.
    """
    for given, known, what in ((names, implementations, "fault"), ([profile], PROFILES, "profile")):
        for word in given:
            if word not in known:
                near = get_close_matches(word, known, n=3)
                raise ValueError(
                    f"there is no {what} {word!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
                )
    for file in (json, markdown, svg):
        if file is not None and not file.resolve().parent.is_dir():
            raise ValueError(f"there is no folder {str(file.parent)!r} to write {file.name!r} in")
    found = []
    for kill in kill_matrix.kills(seed, profile, every_clause=every_clause, names=names):
        found.append(kill)
        if kill.named:
            told = f"{kill.first:5} examples" if kill.caught else f"NOT CAUGHT: {kill.status}"
            yield f"{kill.clause:7} {kill.dtype:9} {told:15}  {kill.fault}: {kill.wrong}", kill.caught
    yield "\n".join(["", *kill_matrix.summary(found)]), True
    for file, text in ((json, kill_matrix.to_json), (markdown, kill_matrix.to_markdown), (svg, kill_matrix.to_svg)):
        if file is not None:
            try:
                file.write_text(text(found), encoding="utf-8")
            except OSError as error:
                why = f"the matrix cannot be written to {str(file)!r}: {error.strerror}"
                raise ValueError(f"{why}; what was found stands above") from None
