"""Campaigns on a Ray cluster of this machine, where Ray is installed: `make campaign-ray`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mha.conformance.campaign.folder import Folder
from support.campaigns import KILLING, PLAN, report_of, run

pytest.importorskip("ray")


def test_cluster_gives_the_report_of_one_machine(tmp_path: Path) -> None:
    plan = replace(PLAN, clauses=("SHP-1", "SHP-5"), seeds=2)
    here, there = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    run(here, plan=plan)
    run(there, plan=plan, engine="ray", address="local", workers=2)
    assert report_of(there) == report_of(here)


def test_interrupted_cluster_keeps_what_is_done(tmp_path: Path) -> None:
    plan = replace(PLAN, clauses=("SHP-1",), seeds=2)
    folder = Folder(tmp_path / "a")
    run(folder, most=1, plan=plan, engine="ray", address="local", workers=2)
    state = run(folder, plan=plan, engine="ray", address="local", workers=2, resume=True)
    assert (state.earlier, state.done) == (1, 3)


def test_crash_on_a_cluster_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(KILLING)
    plan = replace(
        PLAN, implementations=(f"{tmp_path}/killing.py:dying",), clauses=("SHP-1",), seeds=1
    )
    state = run(Folder(tmp_path / "a"), plan=plan, engine="ray", address="local", workers=1)
    assert dict(state.stops) == {"its process was ended by SIGSEGV": 1}


def test_address_without_a_cluster_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster at the address '127\.0\.0\.1:1'"):
        run(Folder(tmp_path / "a"), engine="ray", address="127.0.0.1:1")
    assert not (tmp_path / "a").exists()
