"""A class or a function with the declaration that an earlier version of it was understood by."""

from __future__ import annotations

from pathlib import Path

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.importing import (
    contained,
    described,
    judge_left_alone,
    load_file,
    load_module,
)
from mha.implementations.discovery.loaded import variables_of
from mha.implementations.discovery.resolve import Resolved, as_resolved, split_name


def resolve_as_declared(target: str, declaration: str) -> Resolved:
    """Return what a target names, as a declaration says, which is code below its file.

    A version that computes something else matches no formula, so that it cannot be inferred again.

    target: as for `resolve`, of a file or a module.
    declaration: as of `Inference`.

    Raises ImplementationError where the file cannot be run, or the declaration does not fit.
    """
    _, plain = split_name(target)
    place, _, _ = plain.rpartition(":")
    module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
    names = variables_of(module)
    try:
        with judge_left_alone(), contained(place):
            exec(declaration, names)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of code of others, such as a decorator
        raise ImplementationError(f"{target!r} is not as declared: {described(error)}") from error
    found = as_resolved(names["implementation"])
    return Resolved(found.implementation, target)
