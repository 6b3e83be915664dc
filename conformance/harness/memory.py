"""Memory: the peak that torch allocates during a call, and how much there is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

# The memory limit of a container, in versions 2 and 1 of Linux's control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the peak of what torch allocates during a call, in bytes beyond what it held."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with (
        _silent_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        run()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    allocations = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def memory_limit(device: str) -> float:
    """Return the free bytes of a GPU, or all bytes of the machine or its container.

    It is infinity if they are not known.
    """
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    least = float("inf")
    if getattr(os, "sysconf_names", {}).keys() >= {"SC_PAGE_SIZE", "SC_PHYS_PAGES"}:
        least = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in map(Path, LIMITS):
        if file.is_file():
            limit = file.read_text().strip()
            if limit.isdigit():
                least = min(least, float(limit))
    return least


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what the profiler writes to the terminal, which no option of its own prevents."""
    original = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
