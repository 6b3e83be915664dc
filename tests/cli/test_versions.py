"""What `make versions` tries is what pyproject.toml allows, and what the weekly job has."""

from __future__ import annotations

import re
import tomllib

from support.versions import ENVIRONMENTS, LOWEST, ROOT


def test_lowest_versions_are_the_bounds_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["parallel"]
    lines = LOWEST.read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert pinned == [bound.replace(">=", "==") for bound in bounds]


def test_weekly_job_tries_each_environment() -> None:
    workflow = (ROOT / ".github" / "workflows" / "versions.yml").read_text(encoding="utf-8")
    rows = re.findall(r'environment: (\S+), python: "(\S+)"', workflow)
    assert rows == [(environment.name, environment.python) for environment in ENVIRONMENTS]
