"""`mha bench`: what conforms, timed side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mha.conformance.cases.case import Case
from mha.conformance.judge import check
from mha.conformance.options import validate_choice, validate_devices
from mha.conformance.reports.text import visible
from mha.conformance.speed.compare import Timing, compare
from mha.conformance.speed.plot import to_svg
from mha.conformance.speed.work import SHAPES, Work
from mha.conformance.waivers import built_in_waivers
from mha.implementations import resolve
from mha.spec import Implementation
from mha.spec.claims import DTYPES

SWEEP = (128, 256, 512, 1024, 2048)
HEADER = f"{'':24} {'ms':>9} {'ratio':>7}  {'95% interval':15} {'share':>6} {'GB/s':>6} {'MiB':>8}"


def works(shapes: Sequence[str], dtype: str, device: str, *, sweep: bool) -> list[Work]:
    """Return what is timed: each shape in inference and in training, or self-attention of growing length."""
    if sweep:
        sizes: dict[str, Any] = {"n_heads": 8, "head_dim": 64, "inputs": "self", "dtype": dtype, "device": device}
        return [Work(f"L = S = {length}", Case(L=length, S=length, **sizes), False) for length in SWEEP]
    return [
        Work(shape, Case(**SHAPES[shape], dtype=dtype, device=device), training)
        for shape in shapes
        for training in (False, True)
        if not (training and SHAPES[shape]["L"] == 1)
    ]


def bench(
    targets: Sequence[str],
    shapes: Sequence[str],
    dtype: str,
    device: str,
    rounds: int,
    threads: int,
    *,
    sweep: bool,
    files: Sequence[Path],
) -> Iterator[tuple[str, bool]]:
    """Yield the lines to print, and whether each tells of something wrong; write the files at the end.

    Raises ValueError for what is not known or cannot be written, before anything is timed.
    """
    for shape in shapes:
        validate_choice("shape", [shape], SHAPES)
    validate_choice("dtype", [dtype], DTYPES)
    validate_devices([device])
    for file in files:
        if file.suffix not in (".json", ".svg") or not file.resolve().parent.is_dir():
            raise ValueError(f"--to must name a .json or .svg file in a folder that is there, but is {str(file)!r}")
    chosen = [found for target in targets for found in resolve(target)]
    right = []
    for implementation in chosen:
        failed = failures_of(implementation, dtype, device)
        if failed:
            yield f"{visible(implementation.name)} is not timed: it does not conform ({failed})", True
        else:
            right.append(implementation)
    before, timings = torch.get_num_threads(), list[Timing]()
    torch.set_num_threads(threads or before)
    try:
        for work in works(shapes or tuple(SHAPES), dtype, device, sweep=sweep) if right else ():
            yield f"\n{work.title}, {torch.get_num_threads()} threads", False
            yield HEADER, False
            missing = {each.name: work.unclaimed(each.claims) for each in right}
            for name in filter(missing.get, missing):
                yield f"{visible(name):24} not timed: {missing[name]}", False
            for timing in compare([each for each in right if not missing[each.name]], work, rounds):
                timings.append(timing)
                yield line(timing), bool(timing.wrong) or timing.impossible
    finally:
        torch.set_num_threads(before)
    for file in files:
        write(timings, file)


def failures_of(implementation: Implementation, dtype: str, device: str) -> str:
    """Return the clauses that keep an implementation from conforming, in the quick profile; nothing if it conforms."""
    return check(implementation, "quick", dtypes=[dtype], devices=[device], waivers=built_in_waivers()).failing


def line(timing: Timing) -> str:
    """Return a row of the table."""
    name = f"{visible(timing.implementation):24}"
    if timing.wrong:
        return f"{name} not timed: {visible(timing.wrong)}"
    middle, low, high = timing.ratio
    seconds = median(timing.seconds)
    told = f"{name} {1e3 * seconds:9.2f} {middle:7.2f}  {f'[{low:.2f}, {high:.2f}]':15} {timing.share:6.0%}"
    told += f" {timing.work.bytes_moved / seconds / 1e9:6.1f} {timing.memory / 2**20:8.1f}"
    return f"{told}  MORE THAN THE MACHINE CAN DO: an error of measurement" if timing.impossible else told


def write(timings: Sequence[Timing], file: Path) -> None:
    """Write the timings; raises ValueError where that fails."""
    rows = [asdict(timing) for timing in timings]
    found = [timing for timing in timings if not timing.wrong]
    text = json.dumps(rows, indent=2) if file.suffix == ".json" else to_svg(found) if found else ""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}; the table stands above") from None
