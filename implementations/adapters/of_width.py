"""A module of heads that is made for their width, as a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mha.implementations.adapters.called import forward_of, passed_on
from mha.implementations.adapters.signature import input_names

# What a constructor is given, as code, and by the width of a head.
WIDTH, ROOT, SCALE, NO_DROPOUT = "{}", "{} ** 0.5", "{} ** -0.5", "0.0"
VALUES: dict[str, Callable[[int], float]] = {
    WIDTH: lambda width: width,
    ROOT: lambda width: width**0.5,
    SCALE: lambda width: width**-0.5,
    NO_DROPOUT: lambda _: 0.0,
}


class OfWidth:
    """A function of query, key and value that makes a module for the width of the query's heads.

    constructor: its class, whose forward has the parameters of the function, the three inputs by
        known names.
    given: for each parameter of the constructor that is given, one of `VALUES`.
    """

    def __init__(self, constructor: type[nn.Module], given: Mapping[str, str]) -> None:
        self.constructor, self.given = constructor, dict(given)
        self.__name__, self.__qualname__ = constructor.__name__, constructor.__qualname__
        self.__module__ = constructor.__module__
        self.__signature__ = inspect.signature(forward_of(constructor))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Make the module, and call it."""
        given = self.__signature__.bind_partial(*inputs, **options).arguments
        return self.made(given[self.query].shape[-1])(*inputs, **options)

    @property
    def query(self) -> str:
        """The name of the query, whose width is that of the heads; values may have another one."""
        return input_names(self.__signature__.parameters)[0]

    def made(self, width: int) -> nn.Module:
        """Return the module for heads of a width."""
        arguments = {name: VALUES[code](width) for name, code in self.given.items()}
        return self.constructor(**arguments).eval()

    def code(self, label: str) -> str:
        """Return the same as code.

        label: of the class.
        """
        own = [*self.__signature__.parameters.values()]
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in own]
        width = f"{self.query}.shape[-1]"
        given = [f"{name}={code.format(width)}" for name, code in self.given.items()]
        taken = str(inspect.Signature(bare))[1:-1]
        return f"lambda {taken}: {label}({', '.join(given)}).eval()({passed_on(own)})"
