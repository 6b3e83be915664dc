"""What the pyproject.toml of a user's project says to the judge; torch is not imported, every pytest run reads this."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mha.spec.clauses import VERSIONS


def pinned_contract(folder: Path) -> str:
    """Return the `contract` of `[tool.mha]` in the pyproject.toml of a folder, or else of the next one above it.

    It is the latest version by default. Raises ValueError, in one line, for a file that is not TOML, for an unknown
    version, and for anything else in the table.
    """
    places = (folder.resolve(), *folder.resolve().parents)
    file = next((place / "pyproject.toml" for place in places if (place / "pyproject.toml").is_file()), None)
    if file is None:
        return VERSIONS[-1]
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tool = tomllib.loads(text).get("tool", {})
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or "[tool.mha" not in text:  # of other tools, whose runs must not end here
            return VERSIONS[-1]
        raise ValueError(f"{str(file)!r} cannot be read as TOML: {error}") from None
    table = tool.get("mha", {}) if isinstance(tool, dict) else {}
    contract = table.get("contract", VERSIONS[-1]) if isinstance(table, dict) and set(table) <= {"contract"} else None
    if contract not in VERSIONS:
        known = " or ".join(map(repr, VERSIONS))
        raise ValueError(f"[tool.mha] in {str(file)!r} takes nothing but contract = {known}, a version of the contract")
    return str(contract)
