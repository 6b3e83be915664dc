"""`mha init`: the files with which a project begins to judge its attention."""

from __future__ import annotations

from pathlib import Path

from mha.implementations import ImplementationError, resolve

DECLARATION = "mha_declaration.py"
WORKFLOW = ".github/workflows/mha-conformance.yml"
STEPS = """\
name: attention conformance
on: [push, pull_request]
jobs:
  conformance:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install "mha-conformance[parallel]"
      - run: pytest --pyargs mha.conformance -n auto --mha-profile quick --mha-impl {place}:implementation
"""


def files_for(target: str, folder: Path) -> dict[Path, str]:
    """Return the files to write, with what is in them, for a class named as in `mha check`.

    folder: the project's, where its workflows lie. Raises ImplementationError for what is no plain class, or cannot be
    understood.
    """
    inference = resolve(target)[0].inference
    if inference is None:
        raise ImplementationError(f"{target!r} is declared already; init is for a plain class, as my_file.py:MyClass")
    place, _, cls = target.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    declaration = (file.parent if file else folder) / DECLARATION
    module = file.stem if file else place
    text = f'"""{cls}, declared for mha-conformance."""\n\nfrom {module} import {cls}\n{inference.declaration}\n'
    shown = declaration.resolve()
    inside = shown.relative_to(folder.resolve()) if shown.is_relative_to(folder.resolve()) else shown
    return {declaration: text, folder / WORKFLOW: STEPS.format(place=inside.as_posix())}


def entry_point(target: str) -> str:
    """Return the lines of pyproject.toml that register the declaration, where it is part of a package."""
    name = target.rpartition(":")[2].lower()
    return f'[project.entry-points."mha.implementations"]\n{name} = "{DECLARATION.removesuffix(".py")}:implementation"'
