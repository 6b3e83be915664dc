"""`mha init`: the files with which a project starts to check its attention."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from keyword import iskeyword
from pathlib import Path

from mha.conformance.cli.ci import HOW_TO_SAY_WHERE, badge, installed_from, job_for
from mha.conformance.project import WAIVERS
from mha.conformance.reports.writing import write_together
from mha.implementations import ImplementationError, resolve
from mha.implementations.discovery.loaded import file_of, module_named
from mha.spec.clauses import VERSIONS

# Its first letter keeps it out of the modules that setuptools finds by itself in the root of a
# project.
DECLARATION = "_mha_declaration.py"
WORKFLOW = ".github/workflows/mha-conformance.yml"
RUN = "pytest --pyargs mha.conformance --mha-profile quick --mha-impl {}"
NO_WAIVERS = """\
# Known failures that are accepted, each with its reason: mha waive CLAUSE --reason "..."
"""
DECLARED = '''\
"""{cls}, declared for mha-conformance."""

{imported}
{code}
'''
# For a file whose name no import can have, or has already.
BY_PATH = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

spec = spec_from_file_location({name!r}, Path(__file__).with_name({file!r}))
sys.modules[spec.name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
{cls} = module.{cls}
"""


def write_files(
    target: str, folder: Path, source: str = "", *, force: bool = False
) -> Iterator[str]:
    """Write a declaration, a CI job and a waiver file for a class; yield the lines to print.

    All files are written, or none.

    target: the class, as for `mha check`.
    folder: the root of the project.
    source: where the job installs this package from; by default, where it was installed from here.
    force: whether to overwrite files, except that of the waivers.
    Raises ValueError if there is no folder, the class cannot be understood, or a file exists
        already or cannot be written.
    """
    if not folder.is_dir():
        raise ValueError(f"--folder: there is no folder {str(folder)!r}")
    source = source or installed_from()
    texts = texts_for(target, folder, source)
    declaration, workflow, waivers = texts
    existing = [str(file) for file in (declaration, workflow) if file.exists()]
    if existing and not force:
        raise ValueError(
            f"{' and '.join(existing)} would be overwritten; move existing files away, or add"
            " --force"
        )
    if waivers.exists():
        del texts[waivers]
    _write_all(texts)
    yield from (f"wrote {file}" for file in texts)
    reference = _reference(target, declaration)
    yield f"\nRun it:\n\n    {RUN.format(shlex.quote(f'{reference}:implementation'))}"
    if not source:
        yield (
            "\nThe job needs to know where this package is, which is not on PyPI:"
            f" {HOW_TO_SAY_WHERE}."
        )
    yield f"\nThe badge of the run of every night, for README:\n\n    {badge(folder)}"
    yield (
        "\nTo keep later releases from adding clauses to your run, pin the contract in"
        " pyproject.toml:\n"
    )
    yield f'    [tool.mha]\n    contract = "{VERSIONS[-1]}"'
    if not reference.endswith(".py"):
        yield "\nTo leave out --mha-impl, register it in pyproject.toml:\n"
        yield '    [project.entry-points."mha.implementations"]'
        yield f'    {target.rpartition(":")[2]} = "{reference}:implementation"'


def texts_for(target: str, folder: Path, source: str) -> dict[Path, str]:
    """Return the text of each file to write: the declaration, the CI job, the waivers.

    Raises ImplementationError for anything but a plain class, and for a class that cannot be
    understood.
    """
    inference = resolve(target)[0].inference
    if inference is None:
        raise ImplementationError(
            f"{target!r} is already declared; init takes a plain class, such as my_file.py:Class"
        )
    place, _, cls = target.rpartition(":")
    declaration = _beside(place, folder) / DECLARATION
    text = DECLARED.format(cls=cls, imported=_import(place, cls), code=inference.declaration)
    job = job_for(_implementation(target, declaration, folder), _installs(folder), source)
    return {declaration: text, folder / WORKFLOW: job, folder / WAIVERS: NO_WAIVERS}


def _import(place: str, cls: str) -> str:
    """Return the code that imports a class from a module, or a file beside the declaration."""
    if not place.endswith(".py"):
        return f"from {place} import {cls}"
    stem = Path(place).stem
    is_taken = stem in sys.stdlib_module_names or stem in packages_distributions()
    if stem.isidentifier() and not iskeyword(stem) and not is_taken:
        return f"from {stem} import {cls}"
    name = re.sub(r"\W", "_", f"declared_{stem}")
    return BY_PATH.format(name=name, file=Path(place).name, cls=cls)


def _beside(place: str, folder: Path) -> Path:
    """Return the folder of a file or module, or the root of the project for one outside it."""
    if place.endswith(".py"):
        return Path(place).parent
    file, root = Path(file_of(module_named(place))).resolve(), folder.resolve()
    if not file.is_relative_to(root):
        return folder
    return folder / file.parent.relative_to(root)


def _reference(target: str, declaration: Path) -> str:
    """Return the name of the declaration in the project: a module of a package, or a file."""
    module = target.rpartition(":")[0]
    package = module.rpartition(".")[0]
    if package and not module.endswith(".py") and declaration.parent.name:
        return f"{package}.{declaration.stem}"
    place = declaration.as_posix()
    return f"./{place}" if place.startswith("-") else place  # else it would read as an option


def _implementation(target: str, declaration: Path, folder: Path) -> str:
    """Return what the job judges, as it is named from the root of the project."""
    path, root = declaration.resolve(), folder.resolve()
    from_root = path.relative_to(root) if path.is_relative_to(root) else path
    return f"{_reference(target, from_root)}:implementation"


def _installs(folder: Path) -> list[str]:
    """Return the commands that install a project, if it can be built, and what it requires."""
    commands = []
    if (folder / "requirements.txt").exists():
        commands.append("pip install -r requirements.txt")
    project = folder / "pyproject.toml"
    try:
        declared = tomllib.loads(project.read_text(encoding="utf-8")) if project.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(project)!r} is not valid TOML: {error}") from None
    if "build-system" in declared or (folder / "setup.py").exists():
        return [*commands, "pip install ."]
    dependencies = declared.get("project", {}).get("dependencies", [])
    if dependencies:
        commands.append(f"pip install {shlex.join(dependencies)}")
    return commands


def _write_all(texts: Mapping[Path, str]) -> None:
    """Write files; where one cannot be written, none is."""
    try:
        for file in texts:
            file.parent.mkdir(parents=True, exist_ok=True)
        write_together(texts)
    except OSError as error:
        raise ValueError(f"{error.filename!r} cannot be written: {error.strerror}") from None
