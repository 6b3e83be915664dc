"""`mha bench`: what conforms, timed side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mha.conformance.benchmarks.compare import HEADINGS, Timing, compare
from mha.conformance.benchmarks.plot import to_svg
from mha.conformance.benchmarks.runner import unaffordable
from mha.conformance.benchmarks.workloads import SHAPES, Work, work_of
from mha.conformance.cases.case import Case
from mha.conformance.engine.judge import check
from mha.conformance.harness.isolation import threads
from mha.conformance.reports.html import to_html
from mha.conformance.reports.text import shown, visible
from mha.conformance.results import Report
from mha.conformance.settings import by_name, validate_choice, validate_devices
from mha.implementations import Resolved, resolve
from mha.spec import Implementation
from mha.spec.claims import DTYPES

SWEEP = (128, 256, 512, 1024, 2048, 4096, 8192)
# What is timed unless named: all but what takes many minutes.
USUAL = ("encoder", "long", "token")
FORMS = (".html", ".json", ".svg")
WIDTHS = (9, 7, 16, 6, 6, 9)


def works(shapes: Sequence[str], dtype: str, device: str, count: int, *, sweep: bool) -> list[Work]:
    """Return what is timed: each shape in inference and in training, or self-attention of growing length."""
    if sweep:
        sizes: dict[str, Any] = {"n_heads": 8, "head_dim": 64, "inputs": "self", "dtype": dtype, "device": device}
        return [Work(f"L = S = {length}", Case(L=length, S=length, **sizes), False, count) for length in SWEEP]
    each = [work_of(shape, dtype, device, training=steps, threads=count) for shape in shapes for steps in (False, True)]
    return [work for work in each if not (work.training and work.decodes)]


def bench(
    targets: Sequence[str],
    shapes: Sequence[str],
    dtype: str,
    device: str,
    rounds: int,
    count: int,
    *,
    sweep: bool,
    files: Sequence[Path],
) -> Iterator[tuple[str, bool]]:
    """Yield the lines to print, and whether each tells of something wrong; write the files at the end.

    count: of threads; as torch has them, if 0. Raises ValueError for what is not known or cannot be written, before
    anything is timed.
    """
    for shape in shapes:
        validate_choice("shape", [shape], SHAPES)
    validate_choice("dtype", [dtype], DTYPES)
    validate_devices([device])
    for file in files:
        if file.suffix not in FORMS or not file.resolve().parent.is_dir() or file.is_dir():
            raise ValueError(f"--to must name a {' or '.join(FORMS)} file in a folder that is there, not {str(file)!r}")
        if file.suffix == ".svg" and not sweep:
            raise ValueError(f"{str(file)!r}: a picture is drawn of growing lengths; add --sweep, or write .html")
    chosen = by_name(resolved for target in targets for resolved in resolve(target))
    judged, right, timings = list[Report](), list[Implementation](), list[Timing]()
    for resolved in chosen.values():
        implementation, target = resolved.implementation, resolved.target
        judged.append(report_on(resolved, dtype, device))
        if failed := judged[-1].failing:
            why = visible(shlex.join(["mha", "check", target, "--dtype", dtype, "--device", device]))
            yield f"{shown(implementation.name)} is not timed: it does not conform ({failed}); see {why}", True
        else:
            right.append(implementation)
    with threads(count or torch.get_num_threads()):
        for work in works(shapes or USUAL, dtype, device, torch.get_num_threads(), sweep=sweep) if right else ():
            yield f"\n{work.title}", False
            yield row("", HEADINGS), False
            missing = {each.name: work.unclaimed(each.claims) or unaffordable(each, work) for each in right}
            for name in filter(missing.get, missing):
                timings.append(Timing(implementation=name, work=work, wrong=missing[name]))
                yield line(timings[-1]), False
            for timing in compare([each for each in right if not missing[each.name]], work, rounds):
                timings.append(timing)
                yield line(timing), bool(timing.wrong) or timing.impossible
    for file in files:
        write(judged, timings, file, sweep=sweep)


def report_on(resolved: Resolved, dtype: str, device: str) -> Report:
    """Judge an implementation in the quick profile."""
    return check(resolved, "quick", dtypes=[dtype], devices=[device])


def line(timing: Timing) -> str:
    """Return a row of the table."""
    name = shown(timing.implementation)
    if timing.wrong:
        return f"{name:24} not timed: {visible(timing.wrong)}"
    told = row(name, timing.cells)
    return f"{told}  MORE THAN THE MACHINE CAN DO: an error of measurement" if timing.impossible else told


def row(name: str, cells: Sequence[str]) -> str:
    """Return a line of a table, its cells one under another."""
    return f"{name:24} " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def write(judged: Sequence[Report], timings: Sequence[Timing], file: Path, *, sweep: bool) -> None:
    """Write the timings, as HTML with the report on what was judged; raises ValueError where that fails."""
    picture = to_svg(timings) if sweep else ""
    if file.suffix == ".html":
        targets = {name: target for report in judged for name, target in report.targets.items()}
        verdicts = tuple(verdict for report in judged for verdict in report.verdicts)
        text = to_html(replace(judged[0], verdicts=verdicts, targets=targets), timings, picture)
    else:
        text = picture if file.suffix == ".svg" else json.dumps([asdict(timing) for timing in timings], indent=2)
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}; the table stands above") from None
