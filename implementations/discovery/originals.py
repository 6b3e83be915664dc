"""The functions, classes and constants that the judge runs on: what stands under their names.

Watched are this package, Hypothesis, pytest, NumPy's and some of Python's own modules; what stands
there is compared by identity. What was replaced before judged code ran, as by a test or a debugger,
stays: only a difference between two looks counts.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from operator import attrgetter, is_, methodcaller
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from mha.implementations.discovery.watched import (
    JUDGED,
    MODULES,
    OWN,
    PACKAGES,
    UNREAD,
    UNWATCHED,
)

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
ABSENT = object()
# The type of a function with a cache.
CACHED = type(cache(lambda: None))
# The flag of a class that is made in Python.
CHANGEABLE = 1 << 9


class Change(NamedTuple):
    """Something else than at first: what now stands there, and what puts the first one back."""

    now: object
    undo: Callable[[], object]


# By the name of what is replaced.
Changes = Mapping[str, Change]


class Names(NamedTuple):
    """Names of a module, of a class or of a dictionary, with what stood there first.

    held: the dictionary that has them.
    closed: whether a name that is added hides another one.
    """

    label: str
    owner: Any
    held: Mapping[Any, Any]
    names: tuple[Any, ...]
    values: tuple[Any, ...]
    closed: bool

    @property
    def is_whole(self) -> bool:
        """Whether all that is held is compared: classes hold little else than what is watched."""
        return self.closed or isinstance(self.owner, type)

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Yield what has changed."""
        for name, value in zip(self.names, self.values, strict=True):
            now = self.held.get(name, ABSENT)
            if now is not value:
                yield f"{self.label}.{name}", Change(now, partial(self.put, name, value))
        if not self.closed:
            return
        for name in {*self.held}.difference(self.names):
            if not self.may_be_added(name):
                undo = partial(self.put, name, ABSENT)
                yield f"{self.label}.{name}", Change(self.held[name], undo)

    def may_be_added(self, name: Any) -> bool:
        """Return whether a name hides nothing: in a module, it is none of Python's own."""
        if not isinstance(self.owner, ModuleType):
            return name in UNREAD
        return name not in vars(builtins) or str(name).startswith("__")

    def put(self, name: Any, value: object) -> None:
        """Put a value under a name."""
        is_class = isinstance(self.owner, type)
        if is_class and value is ABSENT:
            type.__delattr__(self.owner, name)
        elif is_class:
            type.__setattr__(self.owner, name, value)
        elif value is ABSENT:
            del self.held[name]  # type: ignore[attr-defined]  # of a module, or a dictionary
        else:
            self.held[name] = value  # type: ignore[index]  # the same


class Watched:
    """Everything that is watched; it grows as modules are loaded.

    functions: the label of each.
    parts: what each function has of `FUNCTION_PARTS`.
    seen: the modules, classes and dictionaries, by their identity: classes may define how they are
        compared. They are held here, so that no other object gets the same number.
    modules: how many were loaded at the last look.
    """

    def __init__(self) -> None:
        self.names: list[Names] = []
        self.functions: dict[FunctionType, str] = {}
        self.parts: list[list[Any]] = [[] for _ in FUNCTION_PARTS]
        self.seen: dict[int, object] = {}
        self.modules = 0

    def extend(self) -> None:
        """Watch the modules that were loaded since the last look."""
        if len(sys.modules) == self.modules:
            return
        self.modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            is_watched = name in MODULES or str(name).partition(".")[0] in PACKAGES
            if not is_watched or name.startswith(JUDGED) or id(module) in self.seen:
                continue
            if issubclass(type(module), ModuleType):
                self.seen[id(module)] = module
                self._add_module(name, module)

    def add(self, label: str, held: dict[Any, Any]) -> None:
        """Watch a dictionary, to which nothing may be added."""
        if id(held) not in self.seen:
            self.seen[id(held)] = held
            self._add_names(label, held, held, [*held], closed=True)

    def _add_names(
        self, label: str, owner: Any, held: Mapping[Any, Any], names: list[Any], *, closed: bool
    ) -> None:
        values = tuple(held[name] for name in names)
        self.names.append(Names(label, owner, held, tuple(names), values, closed))

    def _add_module(self, label: str, module: ModuleType) -> None:
        held = vars(module)
        is_own = label.partition(".")[0] == OWN
        unwatched = UNWATCHED.get(label, set())
        names = []
        for name, value in held.items():
            if name not in unwatched and _counts(name, value, own=is_own):
                names.append(name)
        values = [held[name] for name in names]
        self._add_names(label, module, held, names, closed=is_own)
        for name, value in zip(names, values, strict=True):
            if is_own and name.isupper() and type(value) is dict:
                self.add(f"{label}.{name}", value)
            self._add_value(f"{label}.{name}", value, label)

    def _add_value(self, label: str, value: object, module: str) -> None:
        """Watch the parts of a function, and the members of a class, if the module defines it."""
        for each in _functions(value):
            self._add_function(label, each)
        if not isinstance(value, type) or id(value) in self.seen:
            return
        if value.__module__ == module and value.__flags__ & CHANGEABLE:
            self._add_class(label, value, module)

    def _add_function(self, label: str, function: object) -> None:
        if not isinstance(function, FunctionType) or function in self.functions:
            return
        self.functions[function] = label
        for name, parts in zip(FUNCTION_PARTS, self.parts, strict=True):
            parts.append(getattr(function, name))

    def _add_class(self, label: str, value: Any, module: str) -> None:
        self.seen[id(value)] = value
        held = vars(value)
        names = [name for name in held if name not in UNREAD]
        members = [held[name] for name in names]
        self._add_names(label, value, held, names, closed=module.partition(".")[0] == OWN)
        for name, member in zip(names, members, strict=True):
            self._add_value(f"{label}.{name}", member, module)

    def codes(self) -> dict[int, str]:
        """Return the module of each code object of this package, also of inner ones, by its id."""
        found: dict[int, str] = {}
        for (function, label), code in zip(self.functions.items(), self.parts[0], strict=True):
            if label.partition(".")[0] != OWN:
                continue
            pending = [code]
            while pending:
                each = pending.pop()
                found[id(each)] = str(function.__module__)
                pending += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        return found

    def changes(self) -> dict[str, Change]:
        """Return what has changed; slow."""
        found: dict[str, Change] = {}
        for each in self.names:
            found |= dict(each.changes())
        for name, parts in zip(FUNCTION_PARTS, self.parts, strict=True):
            for (function, label), value in zip(self.functions.items(), parts, strict=True):
                if getattr(function, name) is not value:
                    undo = partial(setattr, function, name, value)
                    found[f"{label}.{name}"] = Change(getattr(function, name), undo)
        return found


def _counts(name: str, value: object, *, own: bool) -> bool:
    """Return whether a name of a module is watched: of another package, only what can be called."""
    if name.startswith("__"):
        return own and name in ("__getattr__", "__dir__")
    return own or callable(value)


def _functions(value: object) -> Iterable[object]:
    """Return the functions that a member of a module or a class consists of."""
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, cached_property):
        return [value.func]
    function: Any = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    found = []
    while type(function) in (FunctionType, CACHED):
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


class _Flat:
    """What is watched, in a few long lists: comparing these takes a millisecond.

    whole: what may hold nothing else, with sizes and values as at the last look.
    held, names, named: the rest, name by name.
    functions, parts: those that have each part.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched, self.count = watched, (-1, -1)
        self.whole: list[Mapping[Any, Any]] = []
        self.sizes: list[int] = []
        self.values: list[Any] = []
        self.held: list[Any] = []
        self.names: list[Any] = []
        self.named: list[Any] = []
        self.functions: list[list[FunctionType]] = []
        self.parts: list[list[Any]] = []

    def is_current(self) -> bool:
        """Return whether nothing more is watched since the last look."""
        return self.count == (len(self.watched.names), len(self.watched.functions))

    def read(self) -> None:
        """Make the lists, with what stood first under each name."""
        watched = self.watched
        self.count = len(watched.names), len(watched.functions)
        self.whole = [each.held for each in watched.names if each.is_whole]
        self._read_names([each for each in watched.names if not each.is_whole])
        functions = [*watched.functions]
        self.functions = []
        self.parts = []
        for parts in watched.parts:
            places = [place for place, part in enumerate(parts) if part is not None]
            self.functions.append([functions[place] for place in places])
            self.parts.append([parts[place] for place in places])
        self.sizes, self.values = [], []  # so that they are compared one by one, once

    def _read_names(self, single: list[Names]) -> None:
        self.held, self.names, self.named = [], [], []
        for each in single:
            self.held += [each.held] * len(each.names)
            self.names += each.names
            self.named += each.values

    def renew(self) -> None:
        """Note what `whole` holds, once it is as at first, with names that may be added."""
        self.sizes = [*map(len, self.whole)]
        self.values = [value for held in self.whole for value in held.values()]


class _Means:
    """What a slow look uses, as it was at first.

    python, own: the names of Python and of this module.
    members: the functions of its classes.
    codes: the code of these, and of its functions.
    """

    def __init__(self) -> None:
        self.python, self.own = vars(builtins), globals()
        self.first_python, self.first_own = self.python.copy(), self.own.copy()
        self.members: list[tuple[type, str, FunctionType]] = []
        functions: list[FunctionType] = []
        for value in self.own.values():
            if isinstance(value, FunctionType):
                functions.append(value)
            elif isinstance(value, type) and value.__module__ == __name__:
                self._add_members(value)
        functions += [member for _, _, member in self.members]
        self.codes = [(function, function.__code__) for function in functions]

    def _add_members(self, cls: type) -> None:
        for name, member in vars(cls).items():
            if isinstance(member, FunctionType):
                self.members.append((cls, name, member))


class Looks(NamedTuple):
    """What looks at the process; watch: watches a dictionary, codes: see `Watched.codes`."""

    changes: Callable[[], dict[str, Change]]
    new_changes: Callable[[Changes], dict[str, Change]]
    watch: Callable[[str, dict[Any, Any]], None]
    codes: Callable[[], dict[int, str]]


def _made() -> Looks:
    """Return what looks at the process, with means of its own.

    Judged code that replaces the names of this module, or `all`, does not change them.
    """
    watched = Watched()
    every, each, same, size = all, map, is_, len
    chain = itertools.chain.from_iterable
    getters = [attrgetter(name) for name in FUNCTION_PARTS]
    values_of = methodcaller("values")
    flat, means = _Flat(watched), _Means()
    repair, put = dict.update, type.__setattr__

    def untouched() -> bool:
        if not flat.is_current():
            flat.read()
        if [*each(size, flat.whole)] != flat.sizes:
            return False
        if not every(each(same, chain(each(values_of, flat.whole)), flat.values)):
            return False
        if not every(each(same, each(dict.get, flat.held, flat.names), flat.named)):
            return False
        for getter, functions, parts in zip(getters, flat.functions, flat.parts, strict=True):
            if not every(each(same, each(getter, functions), parts)):
                return False
        return True

    def with_own_means() -> dict[str, Change]:
        # By syntax alone, as every name may stand for something else now.
        python, first = means.python, means.first_python
        swapped = {}
        for name in first:
            if name in python and python[name] is not first[name]:
                swapped[name] = python[name]
        repair(python, {name: first[name] for name in swapped})
        for name in [name for name in means.own if name in first and name not in means.first_own]:
            del means.own[name]
        repair(means.own, means.first_own)
        for function, code in means.codes:
            function.__code__ = code
        for cls, name, member in means.members:
            put(cls, name, member)
        found = watched.changes()
        repair(python, swapped)
        for name in swapped:
            undo = partial(repair, python, {name: first[name]})
            found[f"builtins.{name}"] = Change(swapped[name], undo)
        return found

    def read() -> dict[str, Change]:
        if untouched():
            watched.extend()
            return {}
        found = with_own_means()
        if not found:
            flat.renew()
            watched.extend()
        return found

    def read_new(before: Changes) -> dict[str, Change]:
        new = {}
        for name, change in read().items():
            if name not in before or before[name].now is not change.now:
                new[name] = change
        return new

    known: list[dict[int, str]] = []

    def codes() -> dict[int, str]:
        before = size(watched.functions)
        watched.extend()
        if not known or size(watched.functions) != before:
            known[:] = [watched.codes()]
        return known[0]

    return Looks(read, read_new, watched.add, codes)


changes, new_changes, watch, codes = _made()
