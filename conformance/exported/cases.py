"""`mha export` and `mha verify`: cases written to files, and outputs of anyone judged by these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call, blocks
from mha.conformance.embedded.cases import BuiltCase, KernelCase
from mha.conformance.embedded.comparing import compared
from mha.conformance.embedded.plan import kernel_cases
from mha.conformance.exported import safetensors
from mha.spec.bounds import Ball
from mha.spec.claims import Claims

# Of the files. A change that a reader of an older one would misread makes the next.
FORMAT = "1"
# What a row of a result may be: the name of the tensor, and of its bound.
RESULTS = {"context": "context.bound", "lse": "lse.bound"}


def export(folder: Path, claims: Claims, *, seed: int = 0, budget: int | None = None) -> int:
    """Write cases into a folder, and return how many: `case_000.safetensors` and so on.

    Each has query (B, H, L, d_k), key (B, H_kv, S, d_k), value (B, H_kv, S, d_v), perhaps mask,
    sinks and slopes, and in float64 the expected context and lse with their bounds. What else the
    call says is in the metadata, as JSON under "options".
    """
    folder.mkdir(parents=True, exist_ok=True)
    cases = kernel_cases(claims, seed=seed, budget=budget)
    for number, case in enumerate(cases):
        built = case.build("cpu", claims.scale_for(case.d))
        tensors = _given(built) | _expected(built, claims)
        metadata = {
            "format": FORMAT,
            "clause": case.clause,
            "about": case.about,
            "case": repr(case),
            "options": json.dumps(_options(case, claims)),
        }
        safetensors.write(folder / f"case_{number:03d}.safetensors", tensors, metadata)
    return len(cases)


def _given(built: BuiltCase) -> dict[str, Tensor]:
    """Return the tensors that a kernel is given."""
    tensors = {"query": built.query, "key": built.key, "value": built.value}
    options = built.options
    if options.mask is not None:
        tensors["mask"] = options.mask
    for name, numbers in {"sinks": options.sinks, "slopes": options.alibi}.items():
        if numbers is not None:
            tensors[name] = torch.tensor(numbers, dtype=torch.float32)
    return tensors


def _expected(built: BuiltCase, claims: Claims) -> dict[str, Tensor]:
    """Return the expected results of a case, with their bounds."""
    call = Call.of(built.inputs, built.options, claims)
    shapes = {"context": call.context_shape(), "lse": call.context_shape()[:3]}
    found: dict[str, Tensor] = {}
    for name, bound in RESULTS.items():
        found[name] = torch.zeros(shapes[name], dtype=torch.float64)
        found[bound] = torch.zeros(shapes[name], dtype=torch.float64)
    for block in blocks(call, call.rows):
        for name, bound in RESULTS.items():
            own: Ball = getattr(block, name)
            for target, numbers in ((found[name], own.mid), (found[bound], own.rad)):
                part = call.of_groups(target)[block.items, block.heads, block.group]
                part[:, :, :, block.rows] = numbers
    return found


def _options(case: KernelCase, claims: Claims) -> dict[str, Any]:
    """Return what the call says beside its tensors."""
    scale = case.scale
    if scale is None:
        scale = claims.scale_for(case.d)
    left, right = case.window or (None, None)
    return {
        "is_causal": case.causal,
        "alignment": case.alignment,
        "scale": scale,
        "softcap": case.softcap,
        "window_left": left,
        "window_right": right,
        "lse_base": claims.lse.base if claims.lse else "e",
    }


def verify(folder: Path, outputs: Path) -> Iterator[dict[str, Any]]:
    """Judge outputs by exported cases: for each case, yield its name, and whether it is right.

    outputs: a folder with files of the same names, each with the tensor "context" (B, H, L, d_v),
        and perhaps "lse" (B, H, L).

    A number is right within its bound; NaN and infinities must be in the same places, and nothing
    is known where the bound is infinite. Raises ValueError for a folder without cases.
    """
    cases = sorted(folder.glob("case_*.safetensors"))
    if not cases:
        raise ValueError(f"{folder} has no case_*.safetensors")
    for path in cases:
        yield {"case": path.stem} | _verified(path, outputs / path.name)


def _verified(case: Path, output: Path) -> dict[str, Any]:
    """Return whether the results in a file are those of a case, and how many numbers are wrong."""
    expected, metadata = safetensors.read(case)
    if not output.exists():
        return {"ok": False, "why": "no output"}
    got, _ = safetensors.read(output)
    wrong = elements = 0
    for name, bound in RESULTS.items():
        if name not in got and name != "context":
            continue
        if name not in got or got[name].shape != expected[name].shape:
            return {"ok": False, "why": f"{name} is missing, or has another shape"}
        outside, _ = compared(got[name].double(), Ball(expected[name], expected[bound]))
        wrong += int(outside.sum())
        elements += outside.numel()
    why = ""
    if wrong:
        why = f"{wrong} of {elements} numbers are outside their bound: {metadata.get('about')}"
    return {"ok": not wrong, "clause": metadata.get("clause"), "why": why}
