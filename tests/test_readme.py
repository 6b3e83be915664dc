"""The README's example is judged as the README says, to the letter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks(label: str) -> list[str]:
    """Return the code blocks that follow a comment."""
    return re.findall(rf"<!-- {re.escape(label)} -->\n```\w*\n(.*?)```", README, flags=re.DOTALL)


def test_example_fails_as_shown(tmp_path: Path) -> None:
    (tmp_path / "my_attention.py").write_text(*blocks("my_attention.py"))
    (command,) = blocks("command")
    arguments = command.replace("pytest conformance", "--pyargs mha.conformance").split()
    only = ["-k", "SHP-6 or MSK-8", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *only], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    failure, summary = blocks("output")
    assert failure in done.stdout
    assert summary.splitlines()[1] in done.stdout


def test_example_is_short_to_adapt_and_to_register() -> None:
    (example,) = blocks("my_attention.py")
    assert len(example.split("implementation = ")[1].splitlines()) < 10
