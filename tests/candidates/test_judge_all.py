"""Candidates in processes of their own: whatever one does costs that one alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mha.conformance.candidates.one import Terms, claims_from
from mha.conformance.candidates.pool import judge_all, judged_before
from mha.conformance.cli.app import app
from mha.spec import Claims

CLAIMS_AS_CODE = (
    "Claims(projections=False, returns_weights=False, masks=(), causal=None, dtypes={'float32'})"
)
CLAIMS: Claims = eval(CLAIMS_AS_CODE)
RIGHT = "def kernel(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n"
# By name: a file, the outcome, and words of why.
CANDIDATES = {
    "right": (RIGHT, "right", ""),
    "zeros": ("def kernel(q, k, v):\n    return 0 * q[..., :1] * v[:, :, :1]\n", "wrong", ""),
    "mean": (
        "def kernel(q, k, v):\n"
        "    return v.mean(2, keepdim=True).expand(*q.shape[:3], -1).contiguous()\n",
        "wrong",
        "the mean of the values",
    ),
    "missing": ("x = 1\n", "no kernel", "KeyError: 'kernel'"),
    "syntax": ("def kernel(:\n", "no kernel", "SyntaxError"),
    "exits": ("raise SystemExit(0)\n", "no kernel", "SystemExit"),
    "ends": ("import os\nos._exit(0)\n", "crashed", "exited with status 0"),
    "killed": (
        "import os, signal\ndef kernel(q, k, v):\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        "crashed",
        "SIGKILL",
    ),
    "hangs": ("while True:\n    pass\n", "timeout", "after 3 s"),
    "memory": ("x = bytearray(1 << 40)\n", "memory", "more than 2000 MiB"),
    "forks": (
        "import os, time\n"
        "for _ in range(5):\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        open(__file__ + '.pids', 'a').write(f'{os.getpid()}\\n')\n"
        "        time.sleep(999)\n" + RIGHT,
        "right",
        "",
    ),
    "prints": ("print('x' * 100000)\n" + RIGHT, "right", ""),
}


def written(folder: Path) -> list[Path]:
    """The files of the candidates."""
    paths = []
    for name, (text, _, _) in CANDIDATES.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text)
    return paths


@pytest.mark.skipif(sys.platform != "linux", reason="limits and orphans are those of Linux")
def test_every_candidate_has_its_outcome(tmp_path: Path) -> None:
    terms = Terms(CLAIMS, seconds=60, timeout=3, memory=2000)
    right = Terms(CLAIMS, seconds=60, timeout=60, memory=2000)
    paths = written(tmp_path)
    hanging = [path for path in paths if path.stem == "hangs"]
    lines = [*judge_all([p for p in paths if p not in hanging], right, jobs=2)]
    lines += judge_all(hanging, terms)
    assert len(lines) == len(CANDIDATES)
    for line in lines:
        _, outcome, why = CANDIDATES[Path(line["file"]).stem]
        assert line["outcome"] == outcome, line
        assert why in line["why"], line
        assert (line["reward"] == 1) == (outcome == "right")
        assert line["reward"] == 1 or line["reward"] <= 0.5
    for process in (tmp_path / "forks.py.pids").read_text().split():
        assert not Path(f"/proc/{process}").exists()


def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    candidates = tmp_path / "candidates"
    candidates.mkdir()
    for name in ("right", "mean", "missing"):
        (candidates / f"{name}.py").write_text(CANDIDATES[name][0])
    claims = tmp_path / "claims.py"
    claims.write_text(f"from mha.spec import Claims\nCLAIMS = {CLAIMS_AS_CODE}\n")
    output = tmp_path / "lines.jsonl"
    command = ["judge-all", str(candidates), "--output", str(output), "--until-failure"]
    command += ["--seconds", "60", "--claims"]

    def run(where: str) -> Result:
        return CliRunner().invoke(app, [*command, where])

    first = run(f"{claims}:CLAIMS")
    assert first.stdout == "1 no kernel, 1 right, 1 wrong\n", first.output
    lines = output.read_text()
    (candidates / "missing.py").write_text(RIGHT)
    assert run(f"{claims}:CLAIMS").stdout == "1 right, 2 known from before\n"
    assert output.read_text().startswith(lines)
    with pytest.raises(ValueError, match=r"OTHER in .* is no mha\.spec\.Claims"):
        claims_from(f"{claims}:OTHER")
    with pytest.raises(ValueError, match="there is no file"):
        claims_from("nowhere.py:CLAIMS")


def test_lines_of_an_earlier_run_are_known(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    assert judged_before(output) == set()
    line = {"file": "a.py", "sha256": "00", "outcome": "right"}
    output.write_text(f'{json.dumps(line)}\n{{"file": "b.py", "sha')
    assert judged_before(output) == {("a.py", "00")}
