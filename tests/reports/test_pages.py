"""The HTML report in a real browser: cells, scripts, keys, and markup that is not executed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.reports.files import render
from mha.conformance.results import Report
from support.reports_made import hostile, two_implementations

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
OPTIONS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-sync",
        "--no-first-run",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ),
)
# Put before the page's own script: it records errors, and what is copied to the clipboard.
PROLOGUE = """<script>
window.errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
console.error = (...parts) => errors.push(parts.join(" "));
const clipboard = { writeText: async (text) => { window.copied = text; } };
Object.defineProperty(navigator, "clipboard", { value: clipboard });
</script>"""
# Put at the end: it takes the steps of a test, and leaves their result in the page.
EPILOGUE = """<script>(async () => {{
const pressed = (key) => new KeyboardEvent("keydown", {{ key, bubbles: true }});
const press = (key) => document.activeElement.dispatchEvent(pressed(key));
const cells = (clause) => document.querySelectorAll(`tr[data-c="${{clause}}"] td button`);
const cell = (clause, place) => cells(clause)[place];
const dialog = document.getElementById("cell");
const result = {{}};
{steps}
result.errors = errors;
result.pwned = window.pwned ?? 0;
const output = document.createElement("pre");
output.id = "result";
output.textContent = JSON.stringify(result);
document.body.append(output);
}})();</script>"""


def in_browser(report: Report, folder: Path, steps: str, address: str = "") -> dict[str, Any]:
    """Open the report, at an address within it, take these steps, and return their result."""
    page = render(report, ".html").replace("<head>", f"<head>{PROLOGUE}", 1)
    file = folder / "report.html"
    file.write_text(
        page.replace("</body>", f"{EPILOGUE.format(steps=steps)}</body>"), encoding="utf-8"
    )
    command = [
        str(BROWSER),
        *OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        file.as_uri() + address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    output = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert output, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(output[1]))
    assert result["errors"] == []
    assert result["pwned"] == 0
    return result


def test_cell_opens_to_its_evidence_and_its_script_is_copied(tmp_path: Path) -> None:
    result = in_browser(
        two_implementations(),
        tmp_path,
        """
        cell("MSK-8", 0).click();
        result.open = dialog.open;
        result.text = dialog.innerText;
        const buttons = [...dialog.querySelectorAll("button")];
        buttons.find((each) => each.textContent === "copy script").click();
        await new Promise((resolve) => setTimeout(resolve, 50));
        result.copied = window.copied;
        result.confirmed = dialog.innerText.includes("copied");
        dialog.close();
        result.focused = document.activeElement === cell("MSK-8", 0);
        cell("SHP-1", 1).click();
        result.passed = dialog.innerText;
        """,
    )
    assert result["open"]
    assert result["confirmed"]
    assert result["focused"]
    assert result["copied"] == two_implementations().verdicts[1].script
    parts = (
        "faulty: MSK-8 (MUST, answers) Empty rows follow one declared policy",
        "✗ fail: float32 on cpu",
        "output_2[0, 0, 0] is nan, but should be 0.5",
        "Case(mask='empty_rows')",
        "assert 1 < 0, 'less & more'",
        "why it matters",
        "usual fix",
        "how libraries differ",
    )
    for part in parts:
        assert part in result["text"]
    assert "known-bad answers rejected\nzeros 5 of 6" in result["passed"]


def test_keys_move_between_cells_and_the_filter_hides_clauses_that_pass(tmp_path: Path) -> None:
    result = in_browser(
        two_implementations(),
        tmp_path,
        """
        const every = (selector) => [...document.querySelectorAll(selector)];
        const rows = () => every("#matrix tr[data-c]").filter((row) => row.offsetParent);
        result.stops = every("#matrix button").filter((each) => each.tabIndex === 0).length;
        cell("SHP-1", 0).focus();
        press("ArrowRight");
        result.right = document.activeElement === cell("SHP-1", 1);
        press("ArrowDown");
        result.down = document.activeElement === cell("MSK-8", 1);
        press("ArrowRight");
        result.edge = document.activeElement === cell("MSK-8", 1);
        result.all = rows().length;
        document.getElementById("filter").click();
        result.filtered = rows().map((row) => row.dataset.c);
        """,
    )
    assert result["stops"] == 1
    assert [result["right"], result["down"], result["edge"]] == [True] * 3
    assert result["all"] == 5
    assert result["filtered"] == ["MSK-8", "MSK-10", "NUM-1"]


def test_failures_are_found_by_search_and_link_to_their_cells(tmp_path: Path) -> None:
    result = in_browser(
        two_implementations(),
        tmp_path,
        """
        const every = (selector) => [...document.querySelectorAll(selector)];
        const shown = (selector) => every(selector).filter((each) => each.offsetParent);
        const title = (article) => article.querySelector("a").textContent.slice(0, 6);
        const articles = () => shown("article").map(title);
        const type = (text) => {
          const input = document.getElementById("search");
          input.value = text;
          input.dispatchEvent(new Event("input"));
        };
        result.all = articles();
        type("faulty policy");
        result.found = articles();
        result.matching = shown("#matrix tr[data-c]").map((row) => row.dataset.c);
        type("msk");
        result.rows = shown("#matrix tr").map((row) => row.dataset.c ?? row.innerText.slice(0, 3));
        type("");
        result.again = articles();
        shown("article a").find((each) => each.textContent.startsWith("MSK-10")).click();
        await new Promise((resolve) => setTimeout(resolve, 50));
        result.title = document.getElementById("cell-title").textContent;
        dialog.close();
        cell("MSK-8", 1).click();
        result.address = location.hash;
        result.label = cell("MSK-8", 0).getAttribute("aria-label");
        """,
    )
    assert result["all"] == result["again"] == ["MSK-8 ", "NUM-1 ", "MSK-10"]
    assert result["found"] == ["MSK-8 "]
    assert result["matching"] == ["MSK-8"]
    assert result["rows"] == ["cla", "MSK", "MSK-8", "MSK-10"]
    assert result["title"].startswith("faulty: MSK-10 ")
    assert result["address"] == "#correct%2FMSK-8"
    assert result["label"] == "faulty, MSK-8: fail"


def test_address_with_a_cell_opens_it(tmp_path: Path) -> None:
    steps = "result.title = dialog.open && document.getElementById('cell-title').textContent;"
    result = in_browser(two_implementations(), tmp_path, steps, "#correct/NUM-1")
    assert result["title"].startswith("correct: NUM-1 ")


def test_implementations_are_sorted_and_the_report_is_downloaded(tmp_path: Path) -> None:
    result = in_browser(
        two_implementations(),
        tmp_path,
        """
        const every = (selector) => [...document.querySelectorAll(selector)];
        const header = (text) => every(".summary th").find((each) => each.innerText === text);
        const names = () => every(".summary tbody th").map((each) => each.innerText);
        const sorted = (text) => { header(text).querySelector("button").click(); return names(); };
        result.given = names();
        const columns = ["implementation", "implementation", "answers", "answers"];
        result.orders = columns.map(sorted);
        result.order = header("answers").ariaSort;
        result.json = await (await fetch(document.getElementById("download").href)).text();
        """,
    )
    one, other = result["given"]
    assert result["orders"] == [[other, one], [one, other], [other, one], [one, other]]
    assert result["order"] == "ascending"
    assert Report.from_json(result["json"]) == two_implementations()


def test_hostile_text_is_shown_and_not_executed(tmp_path: Path) -> None:
    result = in_browser(
        hostile(), tmp_path, 'cell("MSK-8", 0).click(); result.text = dialog.innerText;'
    )
    assert "</script><script>window.pwned=1</script>" in result["text"]
    assert r"\x1b[2J\x07\u202e\udc80" in result["text"]
    assert len(result["text"]) < 200_000
