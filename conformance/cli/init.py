"""`mha init`: the files with which a project starts to check its attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mha.implementations import ImplementationError, resolve

DECLARATION, WAIVERS, WORKFLOW = "mha_declaration.py", "waivers.toml", ".github/workflows/mha-conformance.yml"
STEPS = """\
name: attention conformance
on: [push, pull_request]
jobs:
  conformance:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
{installs}      - run: pip install "mha-conformance[parallel]"
      - run: {command}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: mha-report
          path: mha-report.html
"""
RUN = "pytest --pyargs mha.conformance --mha-profile quick --mha-impl {place}:implementation --mha-waivers {waivers}"
IN_CI = "-n auto --mha-report mha-report.html"
NO_WAIVERS = """\
# Known failures that are accepted, each with its reason. To add one: mha waive CLAUSE --reason "..."
"""
# How a project is installed, by a file in its root.
INSTALLS = {
    "requirements.txt": "pip install -r requirements.txt",
    "pyproject.toml": "pip install .",
    "setup.py": "pip install .",
}


def write_files(target: str, folder: Path, *, force: bool = False) -> Iterator[str]:
    """Write a declaration, a CI job and a file of waivers for a class, all or none, and yield the lines to print.

    target: the class, as for `mha check`. folder: the root of the project. force: whether to overwrite files, except
    that of the waivers. Raises ValueError if there is no folder, the class cannot be understood, or a file exists
    already or cannot be written.
    """
    if not folder.is_dir():
        raise ValueError(f"--folder: there is no folder {str(folder)!r}")
    texts = texts_for(target, folder)
    declaration, workflow, waivers = texts
    existing = [str(file) for file in (declaration, workflow) if file.exists()]
    if existing and not force:
        raise ValueError(f"{' and '.join(existing)} would be overwritten; move existing files away, or add --force")
    if waivers.exists():
        del texts[waivers]
    _write_all(texts)
    yield from (f"wrote {file}" for file in texts)
    command = RUN.format(place=declaration, waivers=waivers)
    yield f"\nRun it:\n\n    {command}"
    lines = entry_point(target).replace("\n", "\n    ")
    yield f"\nIf it is part of a package, register it in pyproject.toml and leave out --mha-impl:\n\n    {lines}"


def texts_for(target: str, folder: Path) -> dict[Path, str]:
    """Return the text of each file to write: the declaration, the CI job, the waivers.

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
    return {declaration: text, folder / WORKFLOW: _job(from_root, folder), folder / WAIVERS: NO_WAIVERS}


def _job(declaration: Path, folder: Path) -> str:
    """Return the CI job; declaration: its path from the root of the project, which is the folder."""
    needed = dict.fromkeys(command for file, command in INSTALLS.items() if (folder / file).exists())
    installs = "".join(f"      - run: {command}\n" for command in needed)
    command = f"{RUN.format(place=declaration.as_posix(), waivers=WAIVERS)} {IN_CI}"
    return STEPS.format(installs=installs, command=command)


def _write_all(texts: Mapping[Path, str]) -> None:
    """Write files, or none of them."""
    parts = {file: file.with_name(f"{file.name}.part") for file in texts}
    try:
        for file, part in parts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(texts[file], encoding="utf-8")
        for file, part in parts.items():
            part.replace(file)
    except OSError as error:
        raise ValueError(f"{error.filename!r} cannot be written: {error.strerror}") from None
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()


def entry_point(target: str) -> str:
    """Return the lines of pyproject.toml that register the declaration as part of a package."""
    name = target.rpartition(":")[2].lower()
    return f'[project.entry-points."mha.implementations"]\n{name} = "{DECLARATION.removesuffix(".py")}:implementation"'
