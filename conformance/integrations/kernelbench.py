"""KernelBench: a `run_and_check_correctness` that judges the new model's output by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mha.conformance.integrations.reading import Reading
from mha.spec.claims import Claims

# The results of the benchmark: a class with the fields compiled, correctness and metadata.
Result = Callable[..., Any]


def run_and_check_correctness(
    read: Callable[[Sequence[Any]], Reading], claims: Claims, result: Result
) -> Callable[..., Any]:
    """Return a function with the parameters of `kernelbench.eval.run_and_check_correctness`.

    read: what the inputs of the problem, as its `get_inputs` returns them, say about the call.
    claims: what the new model must do.
    result: `kernelbench.eval.KernelExecResult`.
    """

    def check(  # noqa: PLR0913  the parameters of the benchmark's own
        original_model_instance: nn.Module,
        new_model_instance: nn.Module,
        get_inputs_fn: Callable[[], Sequence[Any]],
        metadata: dict[str, Any],
        num_correct_trials: int,
        verbose: bool = False,
        seed: int = 42,
        device: torch.device | None = None,
        backend: str = "cuda",
        precision: torch.dtype = torch.float32,
    ) -> Any:
        model = new_model_instance.to(device=device, dtype=precision)
        for trial in range(num_correct_trials):
            torch.manual_seed(seed + trial)
            inputs = [_placed(x, device, precision) for x in get_inputs_fn()]
            # The model gets copies: what it writes into them is not judged as its input.
            given = [_copied(x) for x in inputs]
            with torch.no_grad():
                verdict = read(inputs).judge(model(*given), claims)
            if not verdict.ok:
                metadata["correctness_issue"] = verdict.text
                metadata["correctness_trials"] = f"({trial} / {num_correct_trials})"
                return result(compiled=True, correctness=False, metadata=metadata)
        metadata["correctness_trials"] = f"({num_correct_trials} / {num_correct_trials})"
        return result(compiled=True, correctness=True, metadata=metadata)

    return check


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.clone()
    return x


def _placed(x: Any, device: torch.device | None, precision: torch.dtype) -> Any:
    """Return an input on the device, in the dtype if it is one of numbers."""
    if not isinstance(x, torch.Tensor):
        return x
    if not x.is_floating_point():
        return x.to(device=device)
    return x.to(device=device, dtype=precision)
