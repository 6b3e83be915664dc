"""Functions for `from_sharded` that fail; ranks import them from here."""

from __future__ import annotations

import os
from time import sleep
from typing import Any

from torch import Tensor


def refuse(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    raise ValueError("not today")


def refuse_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        raise ValueError("not here")
    return query


def die_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        os._exit(3)
    return query


def hang_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        sleep(1000)
    return query
