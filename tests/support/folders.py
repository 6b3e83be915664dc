"""Where the tests and what they read lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
CLASSES = ROOT / "tests" / "readings" / "classes"
