"""How soon `mha watch` answers a save: prints the table of docs/how-to/watch.md.

python docs/watching.py [SAVES [early]]    early: leave out the verdict on a right file
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic, sleep

MODULE = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def heads(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))
"""
KERNEL = """
import torch


def kernel(q, k, v, causal=False, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q.float() @ k.float().mT) * scale
    if not causal:
        return (s.softmax(-1) @ v.float()).to(q.dtype)
    L, S = s.shape[-2:]
    keep = torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L)
    weights = s.masked_fill(~keep, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0.0)
    return (weights @ v.float()).to(q.dtype)
"""
# By target: the right text, and what turns it into a wrong one.
SUBJECTS = {
    "module.py:Attention": (MODULE, ("** 0.5", "** 0.6")),
    "kernel.py:kernel": (KERNEL, ("tril(S - L)", "tril(S - L - 1)")),
}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Times:
    """Seconds from saves to an answer: of the clock, and of all processes on their cores."""

    clock: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def add(self, saved: Now, line: Now) -> None:
        self.clock.append(line.clock - saved.clock)
        self.cores.append(line.cores - saved.cores)

    def __str__(self) -> str:
        return f"{median(self.clock):.1f} ({median(self.cores):.1f})" if self.clock else "-"


@dataclass(frozen=True)
class Now:
    """The clock, and the CPU seconds of a process and of all that it has started."""

    clock: float
    cores: float

    @classmethod
    def of(cls, process: int) -> Now:
        """Look at a process now."""
        clock, ticks = monotonic(), 0
        for place in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = place.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if place.parent.name == str(process):
                ticks += sum(map(int, fields[11:15]))
            elif int(fields[1]) == process:
                ticks += sum(map(int, fields[11:13]))
        return cls(clock, ticks / TICKS)


def watched(target: str, saves: int, *, early: bool) -> Iterator[tuple[str, Times]]:
    """Save a file again and again, wrong and right by turns, and yield how soon that was said.

    Of the right ones, only the last is judged to the end: a save ends what is judged.
    """
    text, change = SUBJECTS[target]
    file = Path(target.partition(":")[0])
    first, told, wrong, look, right = Times(), Times(), Times(), Times(), Times()
    file.write_text(text)
    command = [sys.executable, "-m", "mha.conformance", "watch", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = iter(process.stdout)

        def until(start: str) -> Now:
            print(wait(lines, start).rstrip()[:100], file=sys.stderr)
            return Now.of(process.pid)

        until("watching")
        for number in range(saves):
            sleep(0.3)
            is_wrong = number % 2 == 0
            saved = Now.of(process.pid)
            file.write_text(text.replace(*change) if is_wrong else text)
            if is_wrong:
                first.add(saved, until("a case fails"))
                told.add(saved, until("fail"))
                wrong.add(saved, until(".*CONFORM"))
                until("watching")
                continue
            look.add(saved, until("a first look"))
            if number + 1 >= saves - saves % 2 and not early:
                right.add(saved, until(".*CONFORM"))
                until("watching")
        process.terminate()
    yield "first case that fails", first
    yield "made simpler and explained", told
    yield "verdict on a wrong one", wrong
    yield "first look at a right one", look
    yield "verdict on a right one", right


def wait(lines: Iterator[str], start: str) -> str:
    """The next line that begins so."""
    for line in lines:
        if re.match(start, line):
            return line
    raise SystemExit("mha watch has ended")


def main() -> None:
    """Print the table."""
    saves = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    early = sys.argv[2:] == ["early"]
    os.environ["OMP_NUM_THREADS"] = "1"
    for target in SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for name, times in watched(target, saves, early=early):
                print(f"| {target} | {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
