"""Pages of the site that are documents of the repository outside of docs/."""

from __future__ import annotations

from generated.links import PAGES_OF_DOCUMENTS, ROOT

# The page of each document, as `relocated` finds it.
ROOT_DOCUMENTS = {page: source for source, page in PAGES_OF_DOCUMENTS.items()}


def page(source: str) -> str:
    """Return a document as it is; its links are relocated like those of every page."""
    return (ROOT / source).read_text(encoding="utf-8")
