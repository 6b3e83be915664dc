"""The order of all pages."""

from __future__ import annotations

from collections.abc import Mapping

from generated import api

# The pages of each part of the site, with their titles. Clauses are below their families.
NAVIGATION: Mapping[str, Mapping[str, str]] = {
    "Start": {"The first ten minutes": "tutorial.md"},
    "How to": {
        "Judge a class": "how-to/class.md",
        "Judge a kernel": "how-to/kernel.md",
        "Judge at every save": "how-to/watch.md",
        "Judge a library": "how-to/plugin.md",
        "Judge in CI": "how-to/ci.md",
        "Judge inside a program": "embedding.md",
        "Judge on a GPU": "gpu.md",
        "Accept a known failure": "how-to/waivers.md",
        "Write and compare reports": "how-to/reports.md",
        "Judge sharded attention": "sharding.md",
        "Run a campaign": "campaign.md",
        "Compare speed": "speed.md",
    },
    "Reference": {
        "The contract": "clauses/index.md",
        "Verdicts, options of pytest": "results.md",
        "The command mha": "reference/cli.md",
        "Settings: [tool.mha]": "settings.md",
        "Declaring": "declare.md",
        "Claims": "reference/claims.md",
        "A report": "reference/report.md",
        **{package: api.path_of(package) for package in api.PACKAGES},
        "Bad input": "bad-inputs.md",
        "Versions": "versions.md",
    },
    "Explanation": {
        "What is MUST, and why": "levels.md",
        "Bounds": "bounds.md",
        "Directed tests": "directed.md",
        "How small an error is caught": "sharpness.md",
        "The self-test": "selftest.md",
        "Kinds of class": "coverage.md",
        "Faulty implementations": "faults.md",
        "How soon they are found": "bugfinding.md",
    },
    "Findings": {
        "Bug reports on kernels": "kernel-reports.md",
        "Signatures of kernels": "kernel-signatures.md",
        "PyTorch": "pytorch.md",
        "transformers, timm, keras": "ecosystem.md",
        "Tutorials": "tutorials.md",
        "Classes of packages": "raw-classes.md",
    },
    "Project": {
        "Architecture": "project/architecture.md",
        "Contributing": "project/contributing.md",
        "Changes": "project/changelog.md",
    },
}


def toctrees() -> str:
    """Return the trees of the first page, from which the navigation is made."""
    parts = []
    for caption, pages in NAVIGATION.items():
        lines = [f"{title} <{page}>" for title, page in pages.items()]
        parts.append(toctree(lines, caption))
    return "".join(parts)


def toctree(lines: list[str], caption: str = "") -> str:
    """Return a tree of pages that only the navigation shows."""
    options = [":hidden:"]
    if caption:
        options.append(f":caption: {caption}")
    return "\n".join(["", "```{toctree}", *options, "", *lines, "```", ""])
