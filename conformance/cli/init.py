"""`mha init`: the files with which a project starts to check its attention."""

from __future__ import annotations

from collections.abc import Iterator
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


def write_files(target: str, folder: Path) -> Iterator[str]:
    """Write a declaration and a CI job for a class, and yield the lines to print.

    target: the class, as for `mha check`. folder: the root of the project. Raises ValueError if there is no folder,
    the class cannot be understood, or a file exists already or cannot be written.
    """
    if not folder.is_dir():
        raise ValueError(f"--folder: there is no folder {str(folder)!r}")
    texts = texts_for(target, folder)
    existing = [str(file) for file in texts if file.exists()]
    if existing:
        raise ValueError(f"{' and '.join(existing)} would be overwritten; move existing files away first")
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from None
        yield f"wrote {file}"
    declaration = next(iter(texts))
    yield f"\nRun it:\n\n    pytest --pyargs mha.conformance --mha-impl {declaration}:implementation"
    lines = entry_point(target).replace("\n", "\n    ")
    yield f"\nIf it is part of a package, register it in pyproject.toml and leave out --mha-impl:\n\n    {lines}"


def texts_for(target: str, folder: Path) -> dict[Path, str]:
    """Return the text of each file to write, the declaration first.

    Raises ImplementationError for anything but a plain class, and for a class that cannot be understood.
    """
    inference = resolve(target)[0].inference
    if inference is None:
        raise ImplementationError(f"{target!r} is already declared; init takes a plain class, such as my_file.py:Class")
    place, _, cls = target.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    declaration = (file.parent if file else folder) / DECLARATION
    module = file.stem if file else place
    text = f'"""{cls}, declared for mha-conformance."""\n\nfrom {module} import {cls}\n{inference.declaration}\n'
    path, root = declaration.resolve(), folder.resolve()
    from_root = path.relative_to(root) if path.is_relative_to(root) else path
    return {declaration: text, folder / WORKFLOW: STEPS.format(place=from_root.as_posix())}


def entry_point(target: str) -> str:
    """Return the lines of pyproject.toml that register the declaration as part of a package."""
    name = target.rpartition(":")[2].lower()
    return f'[project.entry-points."mha.implementations"]\n{name} = "{DECLARATION.removesuffix(".py")}:implementation"'
