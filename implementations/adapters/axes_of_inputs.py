"""The axes in which a module takes its inputs and returns its output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def _without(image: Tensor, axis: int) -> Tensor:
    """Return an image without an axis of length 1; one that the module has flattened, as it is."""
    return image.squeeze(axis) if image.ndim == 4 else image


# What each does to an input of shape (b, l, d), and to the output, the other way.
TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "b l d": lambda x: x,
    "l b d": lambda x: x.transpose(0, 1),
    "b d l": lambda x: x.transpose(1, 2),
    "b d l 1": lambda x: x.transpose(1, 2).unsqueeze(3),
    "b l 1 d": lambda x: x.unsqueeze(2),
    "b 1 l d": lambda x: x.unsqueeze(1),
}
FROM_LAYOUT = TO_LAYOUT | {
    "b d l 1": lambda x: _without(x, 3).transpose(1, 2),
    "b l 1 d": lambda x: _without(x, 2),
    "b 1 l d": lambda x: _without(x, 1),
}


def laid_out(
    layout: str, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (b, l, d) in a layout; one tensor stays one tensor."""
    change = TO_LAYOUT[layout]
    own_query = change(query)
    own_key = own_query if key is query else change(key)
    if value is query:
        return own_query, own_key, own_query
    if value is key:
        return own_query, own_key, own_key
    return own_query, own_key, change(value)
