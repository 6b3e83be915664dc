"""The HTML report in a real browser: cells open, scripts are copied, keys work, and nothing in it is obeyed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from reports_made import hostile, two_implementations

from mha.conformance.reports.files import rendered
from mha.conformance.results import Report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
LISTEN = """<script>
window.errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
console.error = (...told) => errors.push(told.join(" "));
Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { window.copied = text; } } });
</script>"""
TELL = """<script>(async () => {{
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
const cell = (clause, place) => document.querySelectorAll(`tr[data-c="${{clause}}"] td button`)[place];
const dialog = document.getElementById("cell");
const told = {{}};
{steps}
told.errors = errors;
told.pwned = window.pwned ?? 0;
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify(told);
document.body.append(result);
}})();</script>"""


def in_browser(report: Report, folder: Path, steps: str) -> dict[str, Any]:
    """Open the report, take these steps, and return what they told."""
    page = rendered(report, ".html").replace("<head>", f"<head>{LISTEN}", 1)
    file = folder / "report.html"
    file.write_text(page.replace("</body>", f"{TELL.format(steps=steps)}</body>"), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom")
    command = [str(BROWSER), *options, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert told["errors"] == []
    assert told["pwned"] == 0
    return told


def test_cell_opens_to_its_evidence_and_its_script_is_copied(tmp_path: Path) -> None:
    told = in_browser(
        two_implementations(),
        tmp_path,
        """
        cell("MSK-8", 0).click();
        told.open = dialog.open;
        told.text = dialog.innerText;
        [...dialog.querySelectorAll("button")].find((each) => each.textContent === "copy the script").click();
        await new Promise((resolve) => setTimeout(resolve, 50));
        told.copied = window.copied;
        told.said = dialog.innerText.includes("copied");
        dialog.close();
        told.back = document.activeElement === cell("MSK-8", 0);
        """,
    )
    assert told["open"]
    assert told["said"]
    assert told["back"]
    assert told["copied"] == two_implementations().verdicts[1].script
    parts = (
        "wrong: MSK-8 (MUST) Empty rows follow one declared policy",
        "✗ fail: float32 on cpu",
        "output_2[0, 0, 0] is nan, but should be 0.5",
        "Case(mask='empty_rows')",
        "assert 1 < 0, 'less & more'",
        "why it matters",
    )
    for part in parts:
        assert part in told["text"]


def test_keys_move_between_cells_and_the_filter_hides_what_all_keep(tmp_path: Path) -> None:
    told = in_browser(
        two_implementations(),
        tmp_path,
        """
        const rows = () => [...document.querySelectorAll("#matrix tr[data-c]")].filter((row) => row.offsetParent);
        told.stops = [...document.querySelectorAll("#matrix button")].filter((each) => each.tabIndex === 0).length;
        cell("SHP-1", 0).focus();
        press("ArrowRight");
        told.right = document.activeElement === cell("SHP-1", 1);
        press("ArrowDown");
        told.down = document.activeElement === cell("MSK-8", 1);
        press("ArrowRight");
        told.edge = document.activeElement === cell("MSK-8", 1);
        told.all = rows().length;
        document.getElementById("departing").click();
        told.some = rows().map((row) => row.dataset.c);
        """,
    )
    assert told["stops"] == 1
    assert [told["right"], told["down"], told["edge"]] == [True] * 3
    assert told["all"] == 5
    assert told["some"] == ["MSK-8", "MSK-10", "NUM-1"]


def test_hostile_report_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    told = in_browser(
        hostile(), tmp_path, 'cell("MSK-8", 0).click(); told.text = dialog.innerText; told.size = told.text.length;'
    )
    assert "</script><script>window.pwned=1</script>" in told["text"]
    assert r"\x1b[2J\x07\u202e\udc80" in told["text"]
    assert told["size"] < 200_000
