"""`mha bench`: conforming implementations timed side by side."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from mha.conformance.benchmarks.compare import HEADINGS, Timing, compare
from mha.conformance.benchmarks.page import timing_section
from mha.conformance.benchmarks.plot import to_svg
from mha.conformance.benchmarks.runner import memory_shortage
from mha.conformance.benchmarks.workloads import (
    EVERY_SHAPE,
    KERNEL_SHAPES,
    Workload,
    workloads_of,
)
from mha.conformance.cases.case import Case
from mha.conformance.cli.console import advance, progress_bar
from mha.conformance.engine.judge import judge_all
from mha.conformance.engine.report import report_of_run
from mha.conformance.harness.errors import GpuLost
from mha.conformance.harness.isolation import gpu_is_lost
from mha.conformance.ranges import ROUNDS, THREADS
from mha.conformance.reports.files import suffixes
from mha.conformance.reports.html import to_html
from mha.conformance.reports.kept import FOLDER, keep, read_kept
from mha.conformance.reports.layout import fitted, width_of
from mha.conformance.reports.merge import merge
from mha.conformance.reports.text import visible, visible_line, visible_name
from mha.conformance.reports.writing import write_text
from mha.conformance.results import Report, Verdict, now
from mha.conformance.settings import Settings, by_name, validate_choice, validate_devices
from mha.conformance.sources import judge_digest, loaded_sources, watching_files
from mha.conformance.waivers import expiry_notes, validate_judged
from mha.implementations import Resolved
from mha.implementations.discovery.resolve import find, split_name
from mha.implementations.process.torch_state import threads
from mha.spec import Implementation
from mha.spec.claims import DTYPES

# The lengths of a sweep, in tokens.
SWEEP = (128, 256, 512, 1024, 2048, 4096, 8192)
# All but "huge", which takes many minutes.
DEFAULT_SHAPES = ("encoder", "long", "token")
# In columns, of an implementation's name and of each of `HEADINGS`.
NAME_WIDTH, WIDTHS = 24, (9, 7, 16, 6, 6, 9)
# Below a timing.
IMPOSSIBLE = "\n    FASTER THAN THE MACHINE: an error of measurement"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What `mha bench` times, and where it writes the results.

    targets: the implementations, as `resolve` takes them; ratios are to the first that conforms.
    shapes: of `EVERY_SHAPE`; if empty, `KERNEL_SHAPES` where all targets are kernels, else
        `DEFAULT_SHAPES`, in which kernels are timed between projections.
    sweep: time self-attention of the lengths in `SWEEP` instead.
    dtype, device: where they are judged and timed; if None, the first that the project names.
    waivers: a file.
    rounds: how often each is timed.
    threads: of torch on a CPU; 0 for as many as torch uses.
    files: each in one of `FORMATS`.
    Raises ValueError for options that cannot be followed.
    """

    targets: tuple[str, ...]
    shapes: tuple[str, ...] = ()
    sweep: bool = False
    dtype: str | None = None
    device: str | None = None
    waivers: Path | None = None
    rounds: int = 30
    threads: int = 0
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for unknown words, numbers out of range, and what cannot be used."""
        ROUNDS.require("--rounds", self.rounds)
        THREADS.require("--threads", self.threads)
        validate_choice("shape", self.shapes, EVERY_SHAPE)
        if self.dtype is not None:
            validate_choice("dtype", [self.dtype], DTYPES)
        if self.device is not None:
            validate_devices([self.device])
        for file in self.files:
            if file.suffix not in FORMATS or not file.resolve().parent.is_dir() or file.is_dir():
                raise ValueError(
                    f"--to takes a file name that ends in {suffixes(FORMATS)}, in an existing"
                    f" folder, but was given {str(file)!r}"
                )
            if file.suffix == ".svg" and not self.sweep:
                raise ValueError(
                    f"{str(file)!r}: a picture shows growing lengths; add --sweep, or write .html"
                )

    def settings(self) -> Settings:
        """Return how implementations are judged before they are timed: in one dtype and place."""
        given = Settings.of("quick", 0, (), self.dtype, self.device, self.waivers)
        return given.at(given.dtypes[0], given.devices[0])

    def workloads(self, dtype: str, device: str, *, kernels: bool) -> list[Workload]:
        """Return what is timed, with as many threads as torch has now.

        kernels: whether all targets are.
        """
        count = torch.get_num_threads()
        if self.sweep:
            return self._sweep(dtype, device, count, kernels=kernels)
        default = KERNEL_SHAPES if kernels else DEFAULT_SHAPES
        return workloads_of(self.shapes or tuple(default), dtype, device, threads=count)

    def _sweep(self, dtype: str, device: str, count: int, *, kernels: bool) -> list[Workload]:
        """Return self-attention of growing length or, of kernels, heads of growing length."""
        sizes: dict[str, Any] = {"n_heads": 8, "head_dim": 64, "inputs": "self"}
        if kernels:
            sizes |= {"inputs": "cross", "projected": False}
        swept = []
        for length in SWEEP:
            case = Case(L=length, S=length, dtype=dtype, device=device, **sizes)
            swept.append(Workload(f"L = S = {length}", case, False, count))
        return swept


@dataclass(frozen=True)
class BenchResults:
    """What a run of `mha bench` found: the report on each implementation, and the timings.

    swept: whether the timings are those of a sweep, of which there is a picture.
    """

    reports: Sequence[Report]
    timings: Sequence[Timing]
    swept: bool

    @property
    def picture(self) -> str:
        """An SVG picture of a sweep, else empty."""
        return to_svg(self.timings) if self.swept else ""


def run_benchmarks(options: BenchOptions) -> int:
    """Judge implementations, and time those that conform; print the results, and write the files.

    Return the exit status: 2 if a registered implementation is broken, else 1 if one does not
    conform or a timing is in error, else 0. Raises ValueError for a target that cannot be resolved,
    and for a file that cannot be written.
    """
    settings = options.settings()
    with watching_files():
        found = find(options.targets)
    for note in found.notes:
        echo(f"Note: {visible(note)}")
    chosen = by_name(found.resolved)
    if options.waivers:
        validate_judged(settings.waivers, options.waivers, chosen)
    reports = judge_all_quickly(chosen.values(), settings)
    conforming = []
    for name, resolved in chosen.items():
        if reports[name].conforms:
            conforming.append(resolved.implementation)
    try:
        with threads(options.threads or torch.get_num_threads()):
            kernels = not any(each.implementation.claims.projections for each in chosen.values())
            workloads = options.workloads(settings.dtypes[0], settings.devices[0], kernels=kernels)
            timings = time_all(conforming, workloads, options.rounds)
    except GpuLost as lost:
        raise ValueError(f"{lost.message}, and this process can no longer use the GPU") from None
    for file in options.files:
        write(BenchResults(list(reports.values()), timings, options.sweep), file)
    if found.broken:
        return 2
    if len(conforming) < len(chosen):
        return 1
    return int(any(timing.is_in_error for timing in timings))


def judge_all_quickly(chosen: Iterable[Resolved], settings: Settings) -> dict[str, Report]:
    """Return a report on each implementation, by its name; print which do not conform."""
    reports = {}
    for resolved in chosen:
        name = resolved.implementation.name
        reports[name] = report = judge_quickly(resolved, settings)
        if gpu_is_lost():
            raise ValueError(
                f"this process can no longer use the GPU after a call of {name}; leave {name} out"
            )
        if not report.conforms:
            where = "--dtype", settings.dtypes[0], "--device", settings.devices[0]
            command = visible(shlex.join(["mha", "check", resolved.target, *where]))
            reason = f"it does not conform ({report.failing}); see {command}"
            echo(f"{visible_name(name)} is not timed: {reason}")
    return reports


def judge_quickly(resolved: Resolved, given: Settings) -> Report:
    """Return the report of an earlier run of the same code, or of a new one, with its progress.

    given: the settings of the run; those of the implementation may ignore other clauses.
    """
    name = resolved.implementation.name
    shown = visible_name(name)
    settings = given.of_target(resolved).at(given.dtypes[0], given.devices[0])
    place = place_of(resolved.target, settings)
    for note in expiry_notes(settings.waivers_of(resolved.implementation), [name]):
        echo(f"Note: {visible_line(note)}.")
    kept = read_kept(place)
    if kept:
        echo(f"{shown}: judged before with these sources and versions ({place}; {settings})")
        return kept
    echo(f"Judging {shown} on {settings.devices[0]} in {settings.dtypes[0]} ({settings})")
    clauses, started = [*settings.judged_clauses, ""], now()
    verdicts: list[Verdict] = []
    with progress_bar(Console(), clauses) as bar:
        for verdict in judge_all(resolved, settings):
            verdicts.append(verdict)
            advance(bar, verdicts, clauses[len(verdicts)])
    report = report_of_run(settings, verdicts, targets={name: resolved.target}, started=started)
    keep(report, place)
    return report


def place_of(target: str, settings: Settings) -> Path:
    """Return where the report on a target is kept: by its settings, all versions, and the sources.

    The sources are those of all that is loaded, since a module may change what another one
    computes.
    """
    place = split_name(target)[1].rpartition(":")[0]
    sources = loaded_sources(Path(place) if place.endswith(".py") else None)
    all_of_it = (target, settings, sys.version, judge_digest(), sources.digest)
    digest = sha256(repr(all_of_it).encode()).hexdigest()
    return FOLDER / f"{digest[:32]}.json"


def time_all(
    implementations: Sequence[Implementation], workloads: Iterable[Workload], rounds: int
) -> list[Timing]:
    """Time each workload, and print a table for it."""
    timings: list[Timing] = []
    if not implementations:
        return timings
    for workload in workloads:
        echo(f"\n{workload.title}")
        heading = row("", HEADINGS)
        in_table = width_of(sys.stdout) >= len(heading)
        if in_table:
            typer.echo(heading)
        for timing in timings_of(implementations, workload, rounds):
            timings.append(timing)
            echo(line(timing, in_table=in_table))
    return timings


def timings_of(
    implementations: Sequence[Implementation], workload: Workload, rounds: int
) -> Iterator[Timing]:
    """Yield the timings on one workload, first of the implementations that cannot run it."""
    able = []
    for each in implementations:
        reason = workload.unclaimed(each) or memory_shortage(each, workload)
        if reason:
            yield Timing(implementation=each.name, workload=workload, skip_reason=reason)
        else:
            able.append(each)
    yield from compare(able, workload, rounds)


def echo(text: str) -> None:
    """Print a line, folded to the width of a terminal."""
    typer.echo(fitted(text, sys.stdout))


def line(timing: Timing, *, in_table: bool = True) -> str:
    """Return the row of a table for a timing, or else the same in words, which can be folded."""
    name = visible_name(timing.implementation)
    if timing.skip_reason:
        label = f"{name:{NAME_WIDTH}}" if in_table else f"{name}:"
        return f"{label} not timed: {visible_line(timing.skip_reason)}"
    if in_table:
        text = row(name, timing.cells)
    else:
        named = zip(HEADINGS, timing.cells, strict=True)
        text = f"{name}: {', '.join(f'{heading} {cell}' for heading, cell in named)}"
    if timing.is_impossible:
        text += IMPOSSIBLE
    return text


def row(name: str, cells: Sequence[str]) -> str:
    """Return a row of a table."""
    aligned = (f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f"{name:{NAME_WIDTH}} {' '.join(aligned)}"


def write(results: BenchResults, file: Path) -> None:
    """Write the results in the format of the file's suffix; raises ValueError where that fails."""
    try:
        write_text(file, FORMATS[file.suffix](results))
    except OSError as error:
        raise ValueError(
            f"{str(file)!r} cannot be written: {error.strerror}; the tables are printed above"
        ) from None


def _page(results: BenchResults) -> str:
    """Return the HTML report of the judge, with the timings as a section."""
    return to_html(merge(results.reports), [timing_section(results.timings, results.picture)])


def _json(results: BenchResults) -> str:
    return json.dumps([asdict(timing) for timing in results.timings], indent=2)


# The formats of a file by its suffix; the help of `mha bench` lists the suffixes.
FORMATS: dict[str, Callable[[BenchResults], str]] = {
    ".html": _page,
    ".json": _json,
    ".svg": lambda results: results.picture,
}
