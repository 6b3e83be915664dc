"""The job of GitHub Actions that `mha init` writes, and its badge."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

# The quick profile, in float32 and float64, passes an accumulator in bfloat16, so it is not all
# that is run.
STEPS = """\
name: attention conformance
on:
  push:
  pull_request:
  workflow_dispatch:
  schedule:
    - cron: "23 3 * * *"
env:
  # Where pip gets mha-conformance, which is not on PyPI: the URL of its repository, \
as in git+https://...
  MHA_CONFORMANCE: {source}
jobs:
  conformance:
    runs-on: ubuntu-latest
    timeout-minutes: 180
    env:
      # Quick for a push. Every night, and when it is started by hand, all cases, \
also in half precision.
      MHA_OPTIONS: >-
        ${{{{ (github.event_name == 'schedule' || github.event_name == 'workflow_dispatch')
        && '--mha-profile default --mha-dtype float32 float64 bfloat16 float16' \
|| '--mha-profile quick' }}}}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: |
          test -n "$MHA_CONFORMANCE" || {{ echo {missing}; exit 1; }}
{installs}
      - run: |
          pytest --pyargs mha.conformance -n auto --mha-impl {implementation} \
--mha-report mha-report.html $MHA_OPTIONS
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: mha-report
          path: mha-report.html
"""
TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
OURS = 'pip install "mha-conformance[parallel] @ $MHA_CONFORMANCE"'
HOW_TO_SAY_WHERE = (
    "set the variable MHA_CONFORMANCE of your repository on GitHub (Settings, Secrets and"
    " variables, Actions) to the URL of the repository of mha-conformance, git+https://..., or give"
    " mha init --source URL"
)
GITHUB = re.compile(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$")


def job_for(implementation: str, installs: Sequence[str], source: str) -> str:
    """Return the job that judges an implementation.

    installs: the commands that install the project. source: where pip gets this package; if it is
    empty, the job takes a variable of the repository, and says so where that is not set.
    """
    commands = [TORCH, *installs, OURS]
    return STEPS.format(
        source=json.dumps(source) if source else "${{ vars.MHA_CONFORMANCE }}",
        missing=shlex.quote(f"::error::{HOW_TO_SAY_WHERE}"),
        installs="\n".join(f"      - run: |\n          {command}" for command in commands),
        implementation=shlex.quote(implementation),
    )


def installed_from() -> str:
    """Return where this package was installed from, as pip takes it; "" if not from the web."""
    try:
        origin = json.loads(distribution("mha-conformance").read_text("direct_url.json") or "{}")
    except ValueError:
        return ""
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    if not url.startswith("file:"):
        return ""
    remote = _remote(Path(unquote(urlsplit(url).path)))
    # With a user or a token before the "@", the URL is not for others.
    is_public = remote.startswith("https://") and "@" not in remote
    return f"git+{remote}" if is_public else ""


def badge(folder: Path) -> str:
    """Return the line of Markdown that shows the outcome of the last nightly run of the job."""
    found = GITHUB.search(_remote(folder))
    repository = found[1] if found else "OWNER/REPOSITORY"
    workflow = f"https://github.com/{repository}/actions/workflows/mha-conformance.yml"
    return f"[![attention conformance]({workflow}/badge.svg?event=schedule)]({workflow})"


def _remote(folder: Path) -> str:
    """Return the URL of the repository that a folder was cloned from, empty if there is none."""
    command = ["git", "-C", str(folder), "remote", "get-url", "origin"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
