"""`pytest conformance` as a user runs it, in a fork of this process."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from support.folders import ROOT
from support.forks import run_module

CHECKOUT = ROOT


HERE = {"cwd": CHECKOUT, "capture_output": True, "text": True, "timeout": 300}


QUICK = ("--mha-profile", "quick", "--mha-dtype", "float32")


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest on the checkout's conformance folder."""
    return run_module(
        "pytest", "conformance", "-p", "no:cacheprovider", *arguments, cwd=CHECKOUT, env=env
    )
