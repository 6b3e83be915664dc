"""`mha faults`: the self-test of the suite on the known faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from mha.conformance.faults.kill_matrix import Kill, kills
from mha.conformance.faults.matrix_report import summary, to_json, to_markdown
from mha.conformance.faults.registry import implementations
from mha.conformance.reports.writing import write_text
from mha.conformance.settings import validate_profile

# A form in which the matrix is written.
Form = Callable[[Collection[Kill]], str]


def self_test(
    names: Sequence[str],
    seed: int,
    profile: str,
    *,
    every_clause: bool,
    json: Path | None,
    markdown: Path | None,
) -> Iterator[tuple[str, bool]]:
    """Judge faults, all by default, and write the matrix to the files that are given.

    Yields each line to print, and False with it if it reports a fault that is not caught. Raises
    ValueError for an unknown name or profile, and for a file that cannot be written, before
    anything is judged if possible.
    """
    _validate_names(names)
    validate_profile(profile)
    files: dict[Form, Path | None] = {to_json: json, to_markdown: markdown}
    for file in files.values():
        if file is not None and not file.resolve().parent.is_dir():
            raise ValueError(f"there is no folder {str(file.parent)!r} to write {file.name!r} in")
    cells = []
    for kill in kills(seed, profile, every_clause=every_clause, names=names):
        cells.append(kill)
        if kill.named:
            result = f"NOT CAUGHT: {kill.status}"
            if kill.caught:
                result = f"{kill.cases_to_failure or 0:5} cases"
            line = f"{kill.clause:7} {kill.dtype:9} {result:12}  {kill.fault}: {kill.defect}"
            yield line, kill.caught
    yield "\n".join(["", *summary(cells)]), True
    _write(files, cells)


def _validate_names(names: Sequence[str]) -> None:
    """Raise ValueError for a name that no fault has."""
    for name in names:
        if name not in implementations:
            near = get_close_matches(name, implementations, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"there is no fault {name!r}{hint}")


def _write(files: Mapping[Form, Path | None], cells: Collection[Kill]) -> None:
    """Write the cells to each file; raise ValueError for one that cannot be written."""
    for form, file in files.items():
        if file is not None:
            try:
                write_text(file, form(cells))
            except OSError as error:
                message = f"the matrix cannot be written to {str(file)!r}: {error.strerror}"
                raise ValueError(f"{message}; the results are printed above") from None
