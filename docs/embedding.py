"""What published checkers of kernels accept, beside ours: prints the table of docs/embedding.md.

python docs/embedding.py
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from mha.conformance import judge_kernel, judge_output
from support.embedded_kernels import (
    CLAIMS,
    IMPOSTORS,
    RIGHT,
    Kernel,
    eager,
    in_float32,
    kernel_of,
)

# Each rule says whether it accepts a result, given what a reference in float32 and one in the dtype
# return.
Rule = Callable[[Tensor, Tensor, Tensor], bool]


def share_of_close(rtol: float, atol: float, share: float) -> Rule:
    """Enough of the elements are within a tolerance."""

    def accepts(got: Tensor, wide: Tensor, narrow: Tensor) -> bool:
        expected = wide.to(got.dtype).float()
        close = (got.float() - expected).abs() <= atol + rtol * expected.abs()
        return float(close.float().mean()) >= share

    return accepts


def absolute_or_relative(tolerance: float) -> Rule:
    """Each element has a small absolute or a small relative error; infinities are errors."""

    def accepts(got: Tensor, wide: Tensor, narrow: Tensor) -> bool:
        expected = wide.to(got.dtype).float()
        error = (got.float() - expected).abs()
        too_large = (error > tolerance) & (error / (expected.abs() + 1e-8) > tolerance)
        return bool(got.isfinite().all()) and not bool(too_large.any())

    return accepts


def twice_the_error(got: Tensor, wide: Tensor, narrow: Tensor) -> bool:
    """The largest error is at most twice that of the plain formula in the dtype."""
    allowed = 2 * float((narrow.float() - wide.float()).abs().max())
    return float((got.float() - wide.float()).abs().max()) <= allowed


RULES: dict[str, Rule] = {
    "GPU MODE": share_of_close(0.1, 0.1, 0.95),
    "SOL-ExecBench": share_of_close(1e-2, 1e-2, 0.99),
    "FlashInfer-Bench": absolute_or_relative(1e-2),
    "KernelBench": share_of_close(1e-2, 1e-2, 1.0),
    "twice the error": twice_the_error,
}
# Benchmarks draw normal numbers; KernelBench draws them from 0 to 1, for 512 keys.
UNIFORM = ("KernelBench",)


@dataclass(frozen=True)
class Inputs:
    """Gaussian inputs in bfloat16, as benchmarks draw them, and the options of the call."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    arguments: dict[str, Any]


def inputs_for(kind: str, *, uniform: bool = False) -> Inputs:
    """The inputs on which an impostor shows: 8192 keys, or 1024 with a causal window.

    uniform: as KernelBench has them.
    """
    generator = torch.Generator().manual_seed(0)
    queries, keys = (1024, 1024) if kind in ("window", "causal") else (32, 8192)
    draw, heads, width = torch.randn, 8, 64
    if uniform:
        draw, queries, keys, heads, width = torch.rand, 512, 512, 2, 1024
    shapes = ((1, heads, queries, width), (1, heads, keys, width), (1, heads, keys, width))
    query, key, value = (draw(shape, generator=generator).bfloat16() for shape in shapes)
    options: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if kind == "causal":
        options = arguments = {"is_causal": True}
    elif kind == "window":
        options, arguments = {"window": (255, 0)}, {"window_size": (255, 0)}
    elif kind == "sinks":
        sinks = tuple(head + 2.0 for head in range(heads))
        options, arguments = {"sinks": sinks}, {"sinks": torch.tensor(sinks)}
    return Inputs((query, key, value), options, arguments)


def accepted(kernel: Kernel, kind: str) -> dict[str, bool]:
    """Which rules accept the results of a kernel."""
    found: dict[str, bool] = {}
    # A checker looks at the log-sum-exp only where the kernel is asked for it.
    count = 2 if kind == "lse" else 1
    for uniform in (False, True):
        inputs = inputs_for(kind, uniform=uniform)
        results = called(kernel, inputs)[:count]
        wide = called(kernel_of(in_float32), _wide(inputs))
        narrow = called(kernel_of(eager), inputs)
        for name, rule in RULES.items():
            if (name in UNIFORM) == uniform:
                found[name] = all(map(rule, results, wide, narrow))
        if not uniform:
            verdict = judge_output(inputs.tensors, results, inputs.options, claims=CLAIMS)
    return {name: found[name] for name in RULES} | {"judge_output": verdict.ok}


def _wide(inputs: Inputs) -> Inputs:
    """The same inputs in float32."""
    query, key, value = (x.float() for x in inputs.tensors)
    return Inputs((query, key, value), inputs.options, inputs.arguments)


def called(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, ...]:
    """What a kernel returns, as a tuple."""
    returned = kernel(*inputs.tensors, **inputs.arguments)
    return returned if isinstance(returned, tuple) else (returned,)


def row(name: str, kernel: Kernel, kind: str, claims: Any = CLAIMS) -> str:
    """A row of the table."""
    found = accepted(kernel, kind)
    start = time.process_time()
    # Long enough on a busy machine, too.
    report = judge_kernel(kernel, claims, seconds=60.0, until_failure=True)
    seconds = time.process_time() - start
    found["judge_kernel"] = report.conforms
    cells = ["accepts" if accepts else "·" for accepts in found.values()]
    return f"| {name} | {' | '.join(cells)} | {seconds:.1f} |"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")  # flex_attention says that it is not compiled
    torch.set_num_threads(1)
    names = [*RULES, "`judge_output`", "`judge_kernel`", "its seconds"]
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, (kernel, kind) in IMPOSTORS.items():
        print(row(name, kernel, kind), flush=True)
    for name, (kernel, claims) in RIGHT.items():
        print(row(f"*right*: {name}", kernel, "", claims), flush=True)


if __name__ == "__main__":
    main()
