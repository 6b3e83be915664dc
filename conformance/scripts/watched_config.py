"""Configs that note what is read of them, so that a script writes no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mha.implementations.adapters.configs import AnyConfig

# What an object has as an object.
OF_OBJECTS = frozenset(dir(object())) | {"__dict__"}


class Reads:
    """The names that were read of a config: as attributes, and as items."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.items: set[str] = set()


def watched(config: Any, reads: Reads) -> Any:
    """Return a copy of a config that notes what is read; other objects are returned as they are."""
    if type(config) is AnyConfig:
        return _watched_object(config, reads)
    if type(config) is dict:
        return _watched_dict(config, reads)
    return config


def _watched_object(config: AnyConfig, reads: Reads) -> AnyConfig:
    values = dict(vars(config))

    class Watched(AnyConfig):
        def __getattribute__(self, name: str) -> Any:
            if name in values:
                reads.attributes.add(name)
            return super().__getattribute__(name)

        def __getitem__(self, name: str) -> Any:
            reads.items.add(name)
            return values[name]

        def __contains__(self, name: str) -> bool:
            reads.items.add(name)
            return name in values

        def get(self, name: str, default: Any = None) -> Any:
            reads.items.add(name)
            return values.get(name, default)

    return Watched(**values)


def _watched_dict(config: dict[str, Any], reads: Reads) -> dict[str, Any]:
    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            reads.items.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            reads.items.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            reads.items.add(name)
            return super().get(name, default)

        def __iter__(self) -> Iterator[str]:
            reads.items.update(super().keys())
            return super().__iter__()

    return Watched(config)
