"""One call of a kernel on a case, and all that is looked at around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.calling import Kernel, NotExpressed
from mha.conformance.embedded.cases import BuiltCase, KernelCase
from mha.conformance.embedded.findings import Findings
from mha.conformance.embedded.output import judge_output
from mha.conformance.embedded.probes import (
    Functions,
    Watch,
    Watched,
    is_plain,
    of_result,
    poison,
    same_bits,
    synchronise,
)
from mha.conformance.embedded.state import put_back, settings
from mha.conformance.embedded.verdict import OutputVerdict
from mha.spec.claims import Claims
from mha.spec.scores import Options

# As torch and the judge are before any kernel runs, as long as it is imported after the judge.
UNTOUCHED = Functions.now()
# Of a call of more queries, so many are compared: the oracle takes most of the time.
MOST_ROWS = 512
# Of how many calls the results are looked at again at the end.
MOST_HELD = 3


@dataclass
class Trial:
    """The calls of one kernel.

    The oracle's results are made after a call, and not kept: a kernel that looks for them in
    memory or on the stack finds none.

    held: results that a later call must leave alone, with copies.
    calls_held: of how many calls they are; most_held: of how many they may be.
    """

    kernel: Kernel
    claims: Claims
    device: torch.device
    findings: Findings = field(default_factory=Findings)
    held: list[tuple[KernelCase, Tensor, Tensor]] = field(default_factory=list)
    calls_held: int = 0
    most_held: int = MOST_HELD

    def build(self, case: KernelCase) -> BuiltCase:
        """Return the tensors of a case."""
        return case.build(self.device, self.claims.scale_for(case.d))

    def laid_out(self, case: KernelCase, built: BuiltCase) -> list[Tensor]:
        """Return inputs in the kernel's layout that the judge does not read again."""
        laid_out = list[Tensor]()
        for x in built.inputs:
            copy = x.clone(memory_format=torch.contiguous_format)
            if case.expanded and x is not built.query:
                laid_out.append(self.kernel.layout.from_contract(copy[:1].expand(x.shape)))
            else:
                dense = self.kernel.layout.from_contract(copy).contiguous()
                laid_out.append(_in_longer_rows(dense) if case.strided else dense)
        return laid_out

    def judge(self, case: KernelCase) -> None:
        """Try a case, and judge what the call returns.

        Raises NotExpressed for a case that the kernel has no parameters for.
        """
        built = self.build(case)
        results = self.call(case, built, self.laid_out(case, built))
        if results is not None:
            self.compare(case, built, results)

    def call(
        self, case: KernelCase, built: BuiltCase, inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Call the kernel on tensors in its layout, and return copies of its results.

        Returns None where it returns none that can be judged.
        """
        options = built.options
        if options.mask is not None:
            options = options.change(mask=options.mask.clone())
        watch = Watch(UNTOUCHED, list(_watched(inputs, options)))
        context = (case.B, case.H, case.L, case.d_v or case.d)
        poison([(context, built.query.dtype), (context, torch.float32)], self.device)
        try:
            with torch.no_grad() if case.no_grad else nullcontext():
                returned = self._returned(inputs, built, options)
            synchronise(self.device)
        except NotExpressed:
            raise
        except Exception as error:  # whatever the kernel raises
            message = f"the call raised {type(error).__name__}: {error}"
            self.findings.fail(case.clause, case, message, decisive=not case.may_be_refused)
            return None
        for clause, message in watch.problems():
            self.findings.fail(clause, case, message)
        return self._copied(case, self._results(returned), inputs)

    def repeat(
        self, case: KernelCase, built: BuiltCase, inputs: Sequence[Tensor], times: int
    ) -> None:
        """Call the kernel often, and look at no result: a later call shows what has changed."""
        before = settings()
        try:
            for _ in range(times):
                self._returned(inputs, built, built.options)
        except NotExpressed:
            raise
        except Exception as error:  # whatever the kernel raises, and earlier calls did not
            message = f"a call like those before it raised {type(error).__name__}: {error}"
            self.findings.fail("STA-3", case, message)
        put_back(before)

    def _returned(self, inputs: Sequence[Tensor], built: BuiltCase, options: Options) -> object:
        """Return what the kernel returns."""
        kernel = self.kernel
        if kernel.call is not None:
            return kernel.call(kernel.function, *inputs, options)
        arguments = kernel.arguments(built.query, built.key, options)
        return kernel.function(*inputs, **arguments)

    def _results(self, returned: object) -> list[Any]:
        """Return the context and, where it is claimed, the log-sum-exp that a kernel returned."""
        parts = [returned]
        if isinstance(returned, (tuple, list)):
            parts = list(returned)
        elif isinstance(returned, Mapping):
            parts = list(returned.values())
        if len(parts) > 1:
            parts = [part for part in parts if isinstance(part, Tensor)]
        return parts[: 2 if self.claims.lse is not None else 1]

    def _copied(
        self, case: KernelCase, results: Sequence[Any], inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return copies of results, or None where they are no plain tensors."""
        if not results:
            self.findings.fail("SHP-1", case, "the call returned no tensor")
            return None
        most = case.B * case.H * case.L * (case.d_v or case.d)
        for name, result in zip(("context", "log-sum-exp"), results, strict=False):
            for clause, message in of_result(name, result, inputs, most):
                self.findings.fail(clause, case, message)
        if not all(is_plain(result, self.device, most) for result in results):
            return None
        copies = [result.detach().clone() for result in results]
        if self.calls_held < self.most_held:
            self.calls_held += 1
            self.held += [(case, *pair) for pair in zip(results, copies, strict=True)]
        synchronise(self.device)
        if not all(map(same_bits, results, copies)):
            self.findings.fail("STA-2", case, "a result changed after the call had returned it")
        return copies

    def is_earlier(self, results: Sequence[Tensor]) -> bool:
        """Return whether a result is one of the first calls."""
        if not bool(results[0].isfinite().all()):
            return False  # of memory that was not written, all results may be NaN
        return any(same_bits(results[0], copy) for _, _, copy in self.held)

    def verdict(
        self,
        case: KernelCase,
        built: BuiltCase,
        results: Sequence[Tensor],
        directed: bool | None = None,
    ) -> OutputVerdict:
        """Return the verdict on results in the kernel's layout; directed: as for `judge_output`."""
        return judge_output(
            built.inputs,
            tuple(results),
            built.options,
            claims=self.claims,
            layout=f"b h l d -> {self.kernel.context.pattern}",
            heads=case.H,
            most_rows=MOST_ROWS,
            directed=directed,
        )

    def compare(self, case: KernelCase, built: BuiltCase, results: Sequence[Tensor]) -> None:
        """Compare results with the oracle; a log-sum-exp has a clause of its own."""
        # Of calls that differ from others in their mask or length only, those show what is small.
        is_like_others = case.L > MOST_ROWS or bool(case.mask_once)
        directed = False if is_like_others else None
        verdict = self.verdict(case, built, results, directed)
        wrong = {compared.name for compared in verdict.results if compared.wrong}
        for compared in verdict.results:
            clause = "LSE-1" if compared.name == "lse" else case.clause
            known = self.findings.of(clause, case)
            known.examples += 1
            known.margin = max(known.margin, compared.margin)
        if verdict.ok:
            return
        only_lse = wrong == {"lse"} and not verdict.directed
        clause = "LSE-1" if only_lse else case.clause
        self.findings.fail(clause, case, verdict.text, verdict.cause or verdict.directed)

    def look_again(self) -> None:
        """Look at the first results again: later calls and threads must have left them alone."""
        for case, result, copy in self.held:
            self.findings.of("STA-2", case).examples += 1
            if not same_bits(result, copy):
                self.findings.fail("STA-2", case, "a later call changed an earlier result")


def _in_longer_rows(x: Tensor) -> Tensor:
    """Return equal numbers, each row of them before as many NaN in memory."""
    longer = torch.cat([x, torch.full_like(x, math.nan)], -1)
    return longer[..., : x.shape[-1]]


def _watched(inputs: Sequence[Tensor], options: Options) -> Iterator[Watched]:
    """Yield the tensors of a call, to be looked at after it."""
    for name, tensor in zip(("query", "key", "value"), inputs, strict=True):
        yield Watched.of(name, tensor)
    if options.mask is not None:
        yield Watched.of("the mask", options.mask)
