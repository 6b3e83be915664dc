"""The scripts of failures on ranks, run in processes that have torch loaded."""

from __future__ import annotations

import multiprocessing
import re
import runpy
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


def run_on_ranks(script: str, folder: Path) -> str:
    """Return the traceback of the rank that ended a script, or how it died, or nothing."""
    file = folder / "failure.py"
    file.write_text(script)
    size = int(re.findall(r"nprocs=(\d+)", script)[-1])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.set_forkserver_preload(["torch", "mha.conformance.faults.registry"])
    try:
        torch.multiprocessing.start_processes(
            run_file, (str(file), store.port), nprocs=size, start_method="forkserver"
        )
    except (ProcessRaisedException, ProcessExitedException) as ended:
        return str(ended)
    return ""


def run_file(rank: int, file: str, port: int) -> None:
    """Run what a script runs on each rank."""
    runpy.run_path(file)["run"](rank, port)
