"""The faults of the gallery as kernels: their modules between projections that change nothing.

python -m support.gallery_kernels FOLDER 500
writes candidates for `mha judge-all`, right and wrong, and `claims.py` beside the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS as OF_GALLERY
from mha.conformance.faults.base import Complete, Direct
from mha.conformance.faults.registry import FAULTS, implementations
from mha.spec import Claims, Config, Implementation, Output, Weights
from support.embedded_kernels import bounds_of

Kernel = Callable[..., Any]
# Of a fault's claims, what no call of a kernel shows.
NOT_OF_KERNELS: dict[str, Any] = {
    "projections": False,
    "returns_weights": False,
    "dropout": False,
    "composes": frozenset(),
    "decodes": False,
    "decodes_ragged": False,
    "cache_edits": frozenset(),
    "extras": frozenset(),
    "lengths": None,
    "packed": None,
    "rotary": None,
    "qk_norm": None,
    "second_gradients": False,
    "world_sizes": frozenset(),
    "value_width": False,
    "kv_widths": False,
}


def claims_of(implementation: Implementation) -> Claims:
    """What a fault claims as a kernel."""
    claims = implementation.claims
    dtypes = set(claims.dtypes) & {"bfloat16", "float32", "float16"}
    # A module splits its width, and others are no kernel's.
    return replace(claims, dtypes=dtypes, **NOT_OF_KERNELS)


def kernel_of(implementation: Implementation) -> Kernel:
    """A fault as a function of query, key and value, (B, H, N, d)."""
    # By the sizes of a call: a module may remember what it was called with.
    modules: dict[object, Any] = {}

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = options_of(scale, window_size, attention_chunk, softcap, sinks, alibi_slopes)
        if implementation.claims.lse is not None:
            given["return_lse"] = True
        sizes = query.shape[1], key.shape[1], query.shape[3], query.dtype
        if sizes not in modules:
            # Later calls may need gradients, which pass through the module.
            with torch.inference_mode(mode=False):
                modules[sizes] = built_for(implementation, query, key)
        attention = modules[sizes]
        output: Output = attention(
            side_by_side(query), side_by_side(key, query), side_by_side(value, query),
            mask=attn_mask, is_causal=is_causal, need_weights=False, **given,
        )  # fmt: skip
        context = output.output.unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
        return (context, output.lse) if output.lse is not None else context

    return kernel


def options_of(
    scale: float | None,
    window_size: tuple[int, int],
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> dict[str, Any]:
    """What a call says about the scores, as modules take it; what it does not say is left out."""
    given: dict[str, Any] = {"scale": scale, "softcap": softcap, "chunk": chunk}
    if window_size != (-1, -1):
        given["window"] = bounds_of(window_size)
    if sinks is not None:
        given["sinks"] = tuple(sinks.tolist())
    if slopes is not None and slopes.ndim == 1:
        given["alibi"] = tuple(slopes.tolist())
    elif slopes is not None:
        given["alibi"] = tuple(map(tuple, slopes.tolist()))
    return {name: each for name, each in given.items() if each is not None}


def built_for(implementation: Implementation, query: Tensor, key: Tensor) -> Any:
    """The module for the sizes of a call, whose projections give what they get."""
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[3]
    shared = key_heads if key_heads != heads else None
    config = Config(heads * width, heads, shared, bias=False)
    matrix = torch.eye(heads * width)
    rows = matrix[: key_heads * width]
    weights = Weights(matrix, rows, rows, matrix)
    dtype, device = query.dtype, str(query.device)
    return implementation.build(config, weights, dtype=dtype, device=device)


def side_by_side(x: Tensor, query: Tensor | None = None) -> Tensor:
    """Heads (B, H, N, d) as (B, N, H d), with columns of zeros up to the width of queries."""
    columns = x.transpose(1, 2).flatten(2)
    missing = 0 if query is None else query.shape[1] * query.shape[3] - columns.shape[2]
    return F.pad(columns, (0, missing))


CANDIDATE = """\
\"\"\"{about}\"\"\"
from support.gallery_kernels import kernel_of_fault

kernel = kernel_of_fault({name!r}, {seed})
"""
CLAIMS_FILE = """\
from support.gallery_kernels import CANDIDATES_CLAIM

CLAIMS = CANDIDATES_CLAIM
"""
RIGHT = "Complete"
# What each candidate must keep: all that a fault of the gallery may break, in one dtype.
CANDIDATES_CLAIM = replace(claims_of(Direct(Complete, OF_GALLERY)), dtypes={"float32"})


def kernel_of_fault(name: str, seed: int = 0) -> Kernel:
    """A fault of the gallery by its name, or the class that keeps all; seed: what differs."""
    implementation = Direct(Complete) if name == RIGHT else implementations[name]
    return kernel_of(implementation)


def names() -> list[str]:
    """The faults that claim what `CANDIDATES_CLAIM` does, as kernels."""
    found = dict[str, None]()
    for fault in FAULTS:
        if claims_of(fault.implementation) == claims_of(Direct(Complete, OF_GALLERY)):
            found[fault.name] = None
    return list(found)


def write(folder: Path, count: int) -> None:
    """Write so many candidates: every fifth is right, the others are faults in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = names()
    for number in range(count):
        name = RIGHT if number % 5 == 0 else wrong[(number - number // 5 - 1) % len(wrong)]
        text = CANDIDATE.format(about=f"{name}, candidate {number}", name=name, seed=number)
        (folder / f"candidate_{number:03}.py").write_text(text)
    (folder.parent / "claims.py").write_text(CLAIMS_FILE)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
