"""Finding implementations: registered under the entry-point group, or named by module or by file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from mha.implementations.errors import ImplementationError, UnavailableError
from mha.implementations.inference.infer import infer
from mha.spec import Claims, Config, Implementation, Weights

GROUP = "mha.implementations"


@dataclass(frozen=True, eq=False)
class Inference:
    """How a plain class was understood.

    lines: what is printed about it. declaration: the code that declares the same.
    """

    lines: tuple[str, ...]
    declaration: str


@dataclass(frozen=True, eq=False)
class Resolved:
    """An implementation, and how it was named.

    target: as it was given to `resolve`, which takes it again; for an implementation that "all" named, its registered
    name. inference: None for a declared implementation.
    """

    implementation: Implementation
    target: str
    inference: Inference | None = None


@dataclass(frozen=True)
class Registered:
    """One entry of the group: its name, where it points, and either the implementation or why there is none.

    broken: whether that is a fault, and not something optional that is missing here.
    """

    name: str
    target: str
    implementation: Implementation | None = None
    error: str = ""
    broken: bool = False
    inference: Inference | None = None


def discover() -> list[Registered]:
    """Load every registered implementation, by name; one that fails to load is returned with its error."""
    return [_load_entry(point) for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value))]


def resolve(target: str) -> list[Resolved]:
    """Return the implementations that `target` names.

    target: "all" for every registered one that loads, a registered name, "package.module:object", or
    "path/to/file.py:object"; of a plain module class, or a `functools.partial` of one, it is inferred how to build
        and call it.
    Raises ImplementationError that says what was found instead, and what to do.
    """
    if target == "all":
        loaded = [(entry, entry.implementation) for entry in discover()]
        return [Resolved(each, entry.name, entry.inference) for entry, each in loaded if each is not None]
    if ":" in target:
        place, _, attribute = target.rpartition(":")
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        implementation, inference = _implementation(target, _attribute(module, attribute, target))
        return [Resolved(implementation, target, inference)]
    if target.endswith(".py"):
        names = ", ".join(_classes(_load_file(Path(target)))) or "none"
        raise ImplementationError(f"{target!r}: say which class of it, as {target}:NAME (modules in it: {names})")
    points = [point for point in entry_points(group=GROUP) if point.name == target]
    if len({point.value for point in points}) > 1:
        places = " and ".join(sorted(point.value for point in points))
        raise ImplementationError(f"the name {target!r} is registered twice, by {places}; name one of these instead")
    if not points:
        known = ", ".join(sorted(entry_points(group=GROUP).names)) or "none"
        raise ImplementationError(
            f"no implementation is registered as {target!r} (registered: {known}); "
            "name one of these, or a module:object, or a file.py:object"
        )
    entry = _load_entry(points[0])
    if entry.implementation is None:
        raise ImplementationError(f"the implementation {target!r} ({entry.target}) cannot be used: {entry.error}")
    return [Resolved(entry.implementation, target, entry.inference)]


def preflight(implementation: Implementation) -> None:
    """Build a small attention, so that an adapter that does not fit its module says so before any clause is judged.

    Raises ImplementationError as the adapter does; anything else that `build` raises is for the judge to see.
    """
    name, claims = getattr(implementation, "name", None), getattr(implementation, "claims", None)
    if not (isinstance(name, str) and isinstance(claims, Claims) and callable(getattr(implementation, "build", None))):
        raise ImplementationError(
            f"an implementation has a name (text), claims (a mha.spec.Claims) and a function build; "
            f"{implementation!r:.80} has the name {name!r:.80} and the claims {claims!r:.80}"
        )
    config = Config(d_model=4, n_heads=2, bias=True in claims.bias)
    try:
        implementation.build(config, Weights.random(config, 0, torch.float32), dtype=torch.float32, device="cpu")
    except ImplementationError:
        raise
    except (Exception, SystemExit):
        return


def _load_entry(point: EntryPoint) -> Registered:
    try:
        with _own_warnings():
            found = point.load()
        implementation, inference = _implementation(point.value, found)
        return Registered(point.name, point.value, implementation, inference=inference)
    except UnavailableError as error:
        return Registered(point.name, point.value, error=str(error))
    except ImplementationError as error:
        return Registered(point.name, point.value, error=str(error), broken=True)
    except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
        return Registered(point.name, point.value, error=_one_line(error), broken=True)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Let what is imported warn, also where a run has made warnings errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let what is in a folder be imported, as `python` does for a script and `python -m` where it is called."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # what is imported may have removed it
            sys.path.remove(str(folder))


def _load_module(name: str) -> ModuleType:
    try:
        with _own_warnings(), _beside(Path.cwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise ImplementationError(f"the module {name!r} cannot be imported: {_one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ImplementationError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImplementationError(f"{str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        sys.modules.setdefault(path.stem, module)
        with _own_warnings(), _beside(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        sys.modules.pop(path.stem, None)
        hint = "; name it as a part of its package, package.module:NAME" if "relative import" in str(error) else ""
        raise ImplementationError(f"{str(path)!r} cannot be run: {_one_line(error)}{hint}") from error
    return module


def _attribute(module: ModuleType, name: str, target: str) -> object:
    if not hasattr(module, name):
        public = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
        raise ImplementationError(f"{target!r}: there is no {name!r} in it (it has {public})")
    return getattr(module, name)


def _classes(module: ModuleType) -> list[str]:
    """Return the names of the module classes that a file defines."""
    own = ((name, value) for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name, value in own if isinstance(value, type) and issubclass(value, nn.Module)]


def _implementation(target: str, found: object) -> tuple[Implementation, Inference | None]:
    if isinstance(found, Implementation) and not isinstance(found, type):
        preflight(found)
        return found, None
    cls = found.func if isinstance(found, partial) else found
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        inferred = infer(found, target.rpartition(":")[2])  # type: ignore[arg-type]  # it makes a module
        return inferred.implementation, Inference(inferred.lines, inferred.code)
    kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    advice = "make one with mha.implementations.from_module or from_kernel"
    if isinstance(found, nn.Module):
        advice = f"name the class {type(found).__name__} itself, for it is judged in many sizes"
    raise ImplementationError(
        f"{target!r} is {kind}, neither a torch.nn.Module class nor an implementation (an object with name, claims "
        f"and build); {advice}"
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
