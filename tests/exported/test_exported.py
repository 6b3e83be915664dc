"""Cases as files: written, read by others, and outputs judged by them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.exported import safetensors
from mha.conformance.exported.cases import export, verify
from support.embedded_kernels import CLAIMS, in_float32, kernel_of

RIGHT = kernel_of(in_float32)


def run(folder: Path, outputs: Path, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Write what a kernel returns for each case, as another program would."""
    outputs.mkdir()
    for path in sorted(folder.iterdir()):
        tensors, metadata = safetensors.read(path)
        options = json.loads(metadata["options"])
        window = [options["window_left"], options["window_right"]]
        context, lse = RIGHT(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            tensors.get("mask"),
            options["is_causal"],
            options["scale"],
            tuple(-1 if side is None else side for side in window),
            options["softcap"] or 0.0,
            tensors.get("sinks"),
        )
        safetensors.write(outputs / path.name, {"context": change(context), "lse": lse}, {})


def test_right_outputs_are_verified_and_wrong_ones_are_not(tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    assert export(cases, CLAIMS, budget=8) == 8
    run(cases, tmp_path / "right")
    assert all(line["ok"] for line in verify(cases, tmp_path / "right"))
    run(cases, tmp_path / "wrong", lambda context: context.roll(1, 2))
    assert not any(line["ok"] for line in verify(cases, tmp_path / "wrong"))
    (tmp_path / "right" / "case_003.safetensors").unlink()
    missing = [line for line in verify(cases, tmp_path / "right") if not line["ok"]]
    assert missing == [{"case": "case_003", "ok": False, "why": "no output"}]


@pytest.mark.parametrize("dtype", safetensors.NAMES)
def test_files_hold_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"x": torch.randn(2, 3, 5).to(dtype), "empty": torch.zeros(0, 3, dtype=dtype)}
    safetensors.write(path, tensors, {"about": "numbers"})
    read, metadata = safetensors.read(path)
    assert metadata == {"about": "numbers"}
    assert all(torch.equal(read[name], x) for name, x in tensors.items())
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="no file of safetensors"):
        safetensors.read(path)


def test_the_commands(tmp_path: Path) -> None:
    claims = tmp_path / "claims.py"
    claims.write_text(
        "from mha.spec import Claims\n"
        "CLAIMS = Claims(projections=False, masks=(), causal=None, dtypes={'bfloat16'})\n"
    )
    cases = str(tmp_path / "cases")

    def mha(*words: str) -> Result:
        return CliRunner().invoke(app, words)

    done = mha("export", cases, "--claims", f"{claims}:CLAIMS", "--budget", "2")
    assert done.stdout == f"2 cases in {cases}\n", done.output
    done = mha("verify", cases, str(tmp_path))
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == '{"case": "case_000", "ok": false, "why": "no output"}'
