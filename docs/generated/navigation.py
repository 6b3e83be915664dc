"""The order of all pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generated import api
from generated.links import path_of_clause
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES

# A title with a page, or with a list of such.
Entry = dict[str, Any]


def navigation() -> list[Entry]:
    """Return the tabs of the site, each with its pages."""
    return [
        {"Start": [{"Overview": "index.md"}, {"The first ten minutes": "tutorial.md"}]},
        {
            "How to": [
                {"Judge a class": "how-to/class.md"},
                {"Judge a kernel": "how-to/kernel.md"},
                {"Judge a library": "how-to/plugin.md"},
                {"Judge in CI": "how-to/ci.md"},
                {"Judge on a GPU": "gpu.md"},
                {"Accept a known failure": "how-to/waivers.md"},
                {"Write and compare reports": "how-to/reports.md"},
                {"Judge sharded attention": "sharding.md"},
                {"Run a campaign": "campaign.md"},
                {"Compare speed": "speed.md"},
            ]
        },
        {"Contract": [{"How to read it": "clauses/index.md"}, *_families()]},
        {
            "Reference": [
                {"Verdicts, options of pytest": "results.md"},
                {"The command mha": "reference/cli.md"},
                {"Settings: [tool.mha]": "settings.md"},
                {"Declaring": "declare.md"},
                {"Claims": "reference/claims.md"},
                {"A report": "reference/report.md"},
                *({package: api.path_of(package)} for package in api.PACKAGES),
                {"Bad input": "bad-inputs.md"},
                {"Versions": "versions.md"},
            ]
        },
        {
            "Explanation": [
                {"What is MUST, and why": "levels.md"},
                {"Directed tests": "directed.md"},
                {"How small an error is caught": "sharpness.md"},
                {"Kinds of class": "coverage.md"},
                {"Faulty implementations": "faults.md"},
                {"How soon they are found": "bugfinding.md"},
            ]
        },
        {
            "Findings": [
                {"PyTorch": "pytorch.md"},
                {"transformers, timm, keras": "ecosystem.md"},
                {"Tutorials": "tutorials.md"},
                {"Classes of packages": "raw-classes.md"},
            ]
        },
        {
            "Project": [
                {"Architecture": "project/architecture.md"},
                {"Contributing": "project/contributing.md"},
                {"Changes": "project/changelog.md"},
            ]
        },
    ]


def _families() -> Iterator[Entry]:
    """Yield the clauses of each family."""
    for letters, family in FAMILIES.items():
        clauses = []
        for clause in CLAUSES.values():
            if clause.family == letters:
                title = f"{clause.id} {clause.title.replace('`', '')}"
                clauses.append({title: path_of_clause(clause.id)})
        yield {f"{letters}: {family.title}": clauses}


def pages_of(entries: list[Entry]) -> Iterator[str]:
    """Yield every page of some entries."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)
