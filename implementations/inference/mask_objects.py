"""Masks that a function takes as an attribute of an object."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import Tensor


def attribute_read(function: Callable[..., Any], name: str) -> str | None:
    """Return the first attribute that a function reads of a parameter, and that no tensor has.

    None without one, or without a source.

    >>> def attend(query, attn_mask):
    ...     return query.masked_fill(attn_mask.hidden.bool(), 0.0)
    >>> attribute_read(attend, "attn_mask")
    'hidden'
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
        nodes = [*ast.walk(ast.parse(source))]
    except (OSError, TypeError, ValueError, SyntaxError):  # as of a builtin, or of part of a line
        return None
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == name and not hasattr(Tensor, node.attr):
            return node.attr
    return None
