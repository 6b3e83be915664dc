"""Memory: the peak of what torch holds during a call, and what there is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

# Where a container's limit stands, in either version of Linux's control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@contextmanager
def silent() -> Iterator[None]:
    """Keep from the terminal what the profiler says of itself, which no setting of its own does."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the most bytes that torch held at once during a call, beyond those that it held before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def memory_limit(device: str) -> float:
    """Return the bytes that are free on a GPU, else those of the machine or its container; infinity if nobody tells."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    known = getattr(os, "sysconf_names", {}).keys() >= {"SC_PAGE_SIZE", "SC_PHYS_PAGES"}
    there = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if known else float("inf")
    limits = (Path(file).read_text().strip() for file in LIMITS if Path(file).is_file())
    return min([there, *(float(limit) for limit in limits if limit.isdigit())])
