"""The modules that are loaded, looked at so that none of them can raise.

One that is imported lazily may raise where an attribute of it is read, as where an optional package
is missing; and anything may stand in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# The names of what is run, which no other process can import.
MAINS = ("__main__", "__mp_main__")


def attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute of any object; the default where it has none, or raises instead.

    >>> attribute(sys, "maxsize") == sys.maxsize, attribute(None, "maxsize", 0)
    (True, 0)
    """
    try:
        return getattr(owner, name, default)
    except KeyboardInterrupt:
        raise
    except BaseException:  # it may raise anything
        return default


def variables_of(module: object) -> dict[str, Any]:
    """Return what a module holds by its names, without importing what it imports lazily; {} for
    anything else.

    >>> "maxsize" in variables_of(sys), variables_of(None)
    (True, {})
    """
    held = attribute(module, "__dict__")
    return dict(held) if issubclass(type(held), dict) else {}


def file_of(module: object) -> str:
    """Return the file of a module; "" without one.

    >>> file_of(sys)
    ''
    """
    file = attribute(module, "__file__")
    return file if issubclass(type(file), str) else ""


def module_named(name: object) -> object:
    """Return the module that is loaded under a name; None without one."""
    return sys.modules.get(name) if isinstance(name, str) else None


def every_module() -> list[tuple[str, object]]:
    """Return what is loaded, with its names, as a copy: reading an attribute may import more."""
    return [(name, module) for name, module in list(sys.modules.items()) if module is not None]


def names_of(value: object) -> Iterator[tuple[str, str, str]]:
    """Yield the names under which modules hold an object.

    Each time, these are the module's name, its file ("" without one), and the object's name.

    >>> next((module, name) for module, _, name in names_of(sys.modules) if module == "sys")
    ('sys', 'modules')
    """
    for module, loaded in every_module():
        for name, held in variables_of(loaded).items():
            if held is value:
                yield module, file_of(loaded), name
