"""Writes the sources of the site to a folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from generated import REPORT, files, page
from generated.figures import FIGURES, svg
from generated.links import DOCS, ROOT
from mha.conformance.reports.html import to_html
from mha.conformance.results import Report

# What `make docs` judges as an example; `make report` judges more.
JUDGED = ROOT / "build" / "report.json"
NO_REPORT = "<!doctype html><title>No report</title><p>There was none in this build."


def main(folder: Path) -> None:
    """Write every page, what they show, and the example of a report beside them."""
    shutil.rmtree(folder, ignore_errors=True)
    known = files()
    folder.mkdir(parents=True)
    shutil.copyfile(DOCS / "conf.py", folder / "conf.py")
    for path in known:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix == ".md":
            place.write_text(page(path, known), encoding="utf-8")
        elif (DOCS / path).exists():
            shutil.copyfile(DOCS / path, place)
    for name in FIGURES:
        (folder / "figures" / f"{name}.svg").write_bytes(svg(name))
    extra = folder / "extra"  # copied to the site as it is
    extra.mkdir()
    (extra / REPORT).write_text(_report(), encoding="utf-8")


def _report() -> str:
    """Return the example of a report, whose clauses link to their pages."""
    if not JUDGED.exists():
        return NO_REPORT
    return to_html(Report.from_json(JUDGED.read_text(encoding="utf-8")), clause_pages="clauses/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
