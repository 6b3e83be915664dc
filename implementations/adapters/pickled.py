"""Sending an implementation to other processes."""

from __future__ import annotations

import io
import pickle
import re
from types import FunctionType
from typing import Any

from mha.implementations.discovery.errors import ImplementationError, one_line
from mha.implementations.discovery.loaded import file_of, module_named
from mha.spec import Implementation

# Of an object in memory, which differs from run to run.
ADDRESS = re.compile(" at 0x[0-9a-f]+")


class _Pickler(pickle.Pickler):
    """Notes the modules of what is pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, (type, FunctionType)):
            self.modules.add(value.__module__)
        return NotImplemented


def pickled(implementation: Implementation) -> tuple[bytes, dict[str, str]]:
    """Return an implementation pickled, and the files of the modules that it needs, by name.

    Raises ImplementationError where it cannot be pickled, as where a function is defined within
    another.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(implementation)
    except Exception as error:
        cause = ADDRESS.sub("", one_line(error))
        raise ImplementationError(
            f"{implementation.name} cannot be sent to the ranks ({cause}); define it, and what it"
            " is made of, at the top level of a module, each under a name of its own"
        ) from error
    files = {}
    for name in sorted(pickler.modules):
        place = file_of(module_named(name))
        if place:
            files[name] = place
    return file.getvalue(), files
