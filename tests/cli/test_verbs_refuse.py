"""Input that `mha` cannot use gets one line that says what was expected, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bad_inputs import BAD_INPUTS, stage
from support.command import run


@pytest.mark.mostly_slow(25)
@pytest.mark.parametrize("what", BAD_INPUTS)
def test_bad_input_gets_one_line_and_status_2(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage(tmp_path)
    arguments, message = BAD_INPUTS[what]
    status, output = run(*arguments)
    assert status == 2
    assert message in output
    assert len(output.splitlines()) == 1, output
