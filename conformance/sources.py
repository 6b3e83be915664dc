"""The code behind an implementation: the files and packages that it loads, known by their content.

Files count by their content and by where they are in their package, so that another checkout of the
same code is the same; packages that are installed count by their versions. Nothing here imports or
runs what it looks at.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import chain
from pathlib import Path

import mha.implementations
import mha.spec
from mha.conformance.imported import imported_by, located
from mha.implementations.discovery.loaded import MAINS, every_module, file_of

# What is installed is known by its version.
INSTALLED = ("site-packages", "dist-packages")
NATIVE = (".so", ".pyd", ".dylib", ".dll")
# In bytes. Of larger files, such as weights, the size and both ends count.
LARGE, END = 1 << 28, 1 << 20


@dataclass(frozen=True)
class Sources:
    """What an implementation is made of.

    files: a digest of each file, by its place in its package or folder.
    packages: the versions of what is installed.
    paths: where the files are here.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """One for all of them; "" where there is nothing."""
        if not self.files and not self.packages:
            return ""
        content = repr((sorted(self.files.items()), sorted(self.packages.items())))
        return sha256(content.encode()).hexdigest()[:12]


class _Opened:
    """The files that were opened while `watching_files` was entered."""

    def __init__(self) -> None:
        self.active = self.is_hooked = False
        self.read, self.written = set[str](), set[str]()

    def note(self, event: str, arguments: tuple[object, ...]) -> None:
        """Be the audit hook; it must neither raise nor open anything."""
        if not self.active or event not in ("open", "ctypes.dlopen"):
            return
        if isinstance(path := arguments[0], str | Path):
            reads = event != "open" or _only_reads(*arguments[1:3])
            files = self.read if reads else self.written
            files.add(os.path.abspath(path))


def _only_reads(mode: object = None, flags: object = 0) -> bool:
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


_OPENED = _Opened()


@contextmanager
def watching_files() -> Iterator[None]:
    """Note which files the block opens, such as tables that a module reads while it is imported."""
    if not _OPENED.is_hooked:
        sys.addaudithook(_OPENED.note)
        _OPENED.is_hooked = True
    _OPENED.active = True
    try:
        yield
    finally:
        _OPENED.active = False


def loaded_sources(file: Path | None = None, before: Collection[str] = ()) -> Sources:
    """Return what is loaded here, not of Python or of this package, and what that imports later.

    file: one that need not be among the modules.
    before: the names of modules that were loaded for something else, whose packages do not count
        unless the code names them.
    """
    places = dict(_own_modules())
    if file is not None:
        places.setdefault(os.path.realpath(file), file.name)
    tops = _follow(places)
    for path, name in _data(places):
        places.setdefault(path, name)
    installed = {name for name in _installed_modules() if name not in before}
    return _sources(places, tops | {name.partition(".")[0] for name in installed})


def modules_since(before: Collection[str]) -> dict[str, str]:
    """Return the user's files that were imported since, with their places in packages.

    before: the names of the modules that were loaded then.
    """
    return dict(_own_modules(before))


def with_imports(places: Mapping[str, str]) -> set[str]:
    """Return the user's files, given with their places in packages, and those that they import."""
    every = dict(places)
    _follow(every)
    return set(every)


def packages_of(file: Path) -> Sources:
    """Return the installed packages that a module of this package names, other than torch."""
    tops = {name.partition(".")[0] for name in imported_by(str(file), "")}
    return _sources({}, tops - {"torch"})


@cache
def judge_digest() -> str:
    """Return a digest of the sources of this package."""
    digest = sha256()
    for folder in _ours():
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def digest_of(file: Path) -> str:
    """Return a digest of the content of a file; raises OSError."""
    digest = sha256()
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= LARGE:
            digest.update(stream.read())
        else:
            digest.update(f"{size} ".encode() + stream.read(END))
            stream.seek(-END, os.SEEK_END)
            digest.update(stream.read())
    return digest.hexdigest()[:12]


def name_of(module: str, path: str) -> str:
    """Return the place of a module in its package.

    >>> name_of("a.b", "/x/a/b/__init__.py"), name_of("a.b", "/x/a/b.cpython-311.so")
    ('a/b/__init__.py', 'a/b.cpython-311.so')
    """
    file, parts = Path(path).name, module.split(".")
    if not file.startswith("__init__."):
        parts.pop()
    return "/".join([*parts, file])


def _own_modules(before: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the files of the user's modules, with the places that they have by their names.

    before: the names of modules that do not count.
    """
    found: dict[str, str] = {}
    for name, module in sorted(every_module(), key=lambda each: each[0]):
        path = file_of(module) if name not in before else ""
        if path and name not in MAINS and is_own(real := os.path.realpath(path)):
            found.setdefault(real, name_of(name, path))
    yield from found.items()


def _installed_modules() -> Iterator[str]:
    """Yield the names of the loaded modules of installed packages."""
    for name, module in every_module():
        if set(Path(file_of(module)).parts) & set(INSTALLED):
            yield name


def _follow(places: dict[str, str]) -> set[str]:
    """Add the user's files that those in `places` import; return the top names of all imports."""
    is_foreign, pending = dict[str, bool](), [*places.items()]
    while pending:
        path, name = pending.pop()
        roots = [str(_root(path, name))]
        for imported in sorted(set(imported_by(path, _package(name)))):
            top = imported.partition(".")[0]
            if top not in is_foreign:
                place = located(top, roots)
                is_foreign[top] = bool(place) and not is_own(os.path.realpath(place))
            found = "" if is_foreign[top] else os.path.realpath(located(imported, roots))
            if found not in places and is_own(found):
                places[found] = name_of(imported, found)
                pending.append((found, places[found]))
    return set(is_foreign)


def _package(name: str) -> str:
    """Return the package of a module, by its place."""
    return ".".join(name.split("/")[:-1])


def _root(path: str, name: str) -> Path:
    """Return the folder that holds the top of a package, or a module without one."""
    parents = Path(path).parents
    return parents[min(name.count("/"), len(parents) - 1)]


def _data(places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield native extensions beside modules and in their packages, and files that were read."""
    roots = sorted({_root(path, name) for path, name in places.items()})
    packages = sorted({name.partition("/")[0] for name in places.values() if "/" in name})
    for root in roots:
        found = _native(root.glob("*"))
        for package in packages:
            found += _native((root / package).rglob("*"))
        for file in found:
            yield os.path.realpath(file), file.relative_to(root).as_posix()
    for text in sorted(_OPENED.read - _OPENED.written):
        yield from _read(Path(os.path.realpath(text)), [*roots, Path.cwd()])


def _read(file: Path, roots: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield a file that was read, if it is the user's, with its place in the first folder of it."""
    root = next(filter(file.is_relative_to, roots), None)
    if root is not None and is_own(str(file)) and not _is_hidden(file.relative_to(root)):
        yield str(file), file.relative_to(root).as_posix()


def _native(files: Iterable[Path]) -> list[Path]:
    with suppress(OSError):
        return [each for each in files if each.suffix in NATIVE and is_own(os.path.realpath(each))]
    return []


def _is_hidden(place: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in place.parts)
    return hidden or place.suffix == ".pyc"


def is_own(path: str) -> bool:
    """Return whether a file is the user's: not of Python, of ours, or of an installed package."""
    if not os.path.isfile(path) or path.startswith(_ours()):
        return False
    parts = Path(path).parts
    installed = [number for number, part in enumerate(parts[:-1]) if part in INSTALLED]
    if not installed:
        return not path.startswith(_standard())
    top = parts[installed[-1] + 1].partition(".")[0]
    return not (_distributions(top) or top.startswith("__editable__"))


@cache
def _ours() -> tuple[str, ...]:
    """Return the folders of this package, whose content a version of the judge stands for."""
    initial = [mha.spec.__file__, mha.implementations.__file__, __file__]
    return tuple(f"{Path(str(file)).resolve().parent}{os.sep}" for file in initial)


@cache
def _standard() -> tuple[str, ...]:
    """Return the folders of Python itself."""
    paths = sysconfig.get_paths()
    folders = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib")}
    return tuple(f"{each}{os.sep}" for each in folders)


def _distributions(top: str) -> list[str]:
    """Return the installed packages that bring a module, by its top name."""
    return [name for name in _packages().get(top, ()) if name != "mha-conformance"]


@cache
def _packages() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _sources(places: Mapping[str, str], tops: Iterable[str]) -> Sources:
    found = []
    for path, name in places.items():
        with suppress(OSError):
            found.append((name, digest_of(Path(path)), path))
    files: dict[str, str] = {}
    paths: dict[str, str] = {}
    for name, digest, path in sorted(found):
        unique = name if name not in files else f"{name} ({len(files)})"
        files[unique], paths[unique] = digest, path
    packages: dict[str, str] = {}
    installed = set(chain.from_iterable(map(_distributions, tops)))
    for package in sorted(installed):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return Sources(files, packages, paths)
