"""Where the documentation is: the one place that knows its address."""

from __future__ import annotations

from importlib.metadata import metadata

# Below the site, the folder with a page for each clause.
CLAUSES_FOLDER = "clauses/"


def site() -> str:
    """Return the address of the site, with a slash at its end; empty where it has none.

    It is `Documentation` in `project.urls` of pyproject.toml.
    """
    for line in metadata("mha-conformance").get_all("Project-URL") or ():
        label, _, address = line.partition(", ")
        if label == "Documentation":
            return f"{address.rstrip('/')}/"
    return ""


def clause_base() -> str:
    """Return the address below which each clause has a page; empty without a site."""
    return f"{site()}{CLAUSES_FOLDER}" if site() else ""


def clause_page(clause: str) -> str:
    """Return where to read about a clause: its page, or else the file of the contract.

    >>> clause_page("MSK-1").rpartition("/")[2] in ("msk-1.html", "CONTRACT.md#msk-1")
    True
    """
    if site():
        return f"{clause_base()}{clause.lower()}.html"
    return f"spec/CONTRACT.md#{clause.lower()}"
