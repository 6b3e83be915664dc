"""FlashInfer-Bench and SOL-ExecBench: an evaluator whose `check_correctness` is the judge's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mha.conformance.integrations.reading import Reading
from mha.spec.claims import Claims


def attention_evaluator(
    read: Callable[[Any, Sequence[Any]], Reading],
    claims: Claims,
    can_evaluate: Callable[[Any], bool],
) -> type[Any]:
    """Return a subclass of `DefaultEvaluator`, to be listed before it in the registry.

    read: what a definition and the inputs of one trial say about the call.
    claims: what a solution must do.
    can_evaluate: whether a definition is one of attention that `read` knows.
    """
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
    from flashinfer_bench.bench.utils import make_eval
    from flashinfer_bench.data import Correctness, EvaluationStatus

    class AttentionEvaluator(DefaultEvaluator):  # type: ignore[misc]  # it may not be installed
        """Judges attention by its oracle; baseline and timing are those of the benchmark."""

        @classmethod
        def can_evaluate(cls, definition: Any) -> bool:
            return can_evaluate(definition)

        @classmethod
        def check_correctness(  # noqa: PLR0913  the parameters of the benchmark's own
            cls,
            definition: Any,
            sol_runnable: Any,
            inputs: list[list[Any]],
            ref_outputs: list[list[torch.Tensor]],
            cfg: Any,
            log_path: str,
            device: str,
        ) -> tuple[Any, Any]:
            error = 0.0
            where = {"device": device, "log_path": log_path}
            for given in inputs:
                try:
                    with torch.no_grad():
                        if sol_runnable.metadata.destination_passing_style:
                            output = allocate_outputs(definition, given, device)
                            sol_runnable(*given, *output)
                        else:
                            returned = sol_runnable(*given)
                            output = normalize_result(definition, returned, device)
                except Exception as raised:
                    status = EvaluationStatus.RUNTIME_ERROR
                    return None, make_eval(status=status, extra_msg=str(raised), **where)
                verdict = read(definition, given).judge(tuple(output), claims)
                # Of the bound on rounding, not of the number.
                error = max([error, *(result.margin for result in verdict.results)])
                found = Correctness(max_relative_error=error, max_absolute_error=error)
                if not verdict.ok:
                    status = EvaluationStatus.INCORRECT_NUMERICAL
                    told = {"correctness": found, "extra_msg": verdict.text}
                    return found, make_eval(status=status, **told, **where)
            return Correctness(max_relative_error=error, max_absolute_error=error), None

    return AttentionEvaluator
