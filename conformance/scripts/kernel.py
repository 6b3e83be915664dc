"""A kernel in a script: its inputs as heads, in its own layout, or projections that make them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep
from mha.conformance.scripts.axes import rearranged
from mha.conformance.scripts.calls import Recorder, Writer, copies_of, taken
from mha.conformance.scripts.literals import literal, name_tensor, switched
from mha.conformance.scripts.terms import InexpressibleError, made_code
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.adapters.kernel import KernelAttention, KernelImplementation
from mha.implementations.adapters.kernel_axes import function_of
from mha.implementations.adapters.of_width import OfWidth
from mha.implementations.adapters.outputs import as_output
from mha.implementations.discovery.resolve import original_of
from mha.spec.problem import INPUTS

LINEAR = "torch.nn.functional.linear"
FROZEN = "{}.requires_grad_(False)"


class KernelWriter(Writer):
    """Writes what is done with a kernel that `from_kernel` adapts.

    heads_alone: whether query, key and value of the kernel are written as they are, without how
        they are projected.
    """

    def __init__(self, *args: Any, heads_alone: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        original = original_of(self.session.implementation)
        assert isinstance(original, KernelImplementation)
        self.adapter, self.heads_alone = original, heads_alone
        self.adapted: dict[int, KernelAttention] = {}
        self.kernel = ""

    def build(self, step: BuildStep) -> list[str]:
        """Return the lines that make the kernel, and those of the weights of its projections."""
        case = self.session.case
        dtype = getattr(torch, case.dtype)
        try:
            self.adapted[step.number] = self.adapter.build(
                step.config, step.weights, dtype=dtype, device=case.device
            )
        except Exception:
            raise InexpressibleError(
                "its adapter, and not the kernel, refuses the configuration"
            ) from None
        if self.adapted[step.number].axes.of_tokens:
            raise InexpressibleError("its adapter packs the items of a batch")
        lines: list[str] = []
        if not self.kernel:
            lines += self._made()
        if self.heads_alone or not step.config.projected:
            return lines
        codes = []
        for name, x in step.weights.named():
            codes.append(name_tensor(x, f"{name}_{step.number}", self.names, lines))
        if self.adapter.claims.gradients and self.careful:
            lines += [f"for x in ({', '.join(codes)}):", "    x.requires_grad_()"]
        return lines

    def _made(self) -> list[str]:
        """Return the lines that make the kernel, if it is a module, and set its name."""
        kernel, case = self.adapter.kernel, self.session.case
        if isinstance(kernel, OfWidth):
            self.kernel = "kernel"
            cls = made_code(kernel.constructor, {}, self.imports).removesuffix("()")
            return [f"kernel = {kernel.code(cls)}"]
        if not isinstance(kernel, nn.Module):
            self.kernel = made_code(kernel, {}, self.imports).removesuffix("()")
            if not self.kernel.isidentifier():
                raise InexpressibleError("its kernel is a functools.partial")
            return []
        parameters = inspect.signature(type(kernel)).parameters
        dropouts = [name for name in CONSTRUCTOR_NAMES["dropout"] if name in parameters]
        made = made_code(type(kernel), dict.fromkeys(dropouts, "0.0"), self.imports)
        self.kernel = "kernel"
        return [f"kernel = {made}.to(device={case.device!r}, dtype=torch.{case.dtype})"]

    def derive(self, step: DeriveStep) -> list[str]:
        """Return nothing for frozen weights; anything else is made of the adapter too."""
        if step.code != FROZEN:
            raise InexpressibleError(
                "the kernel is judged as a part of a module, of which this is a copy"
            )
        self.adapted[step.number] = self.adapted[step.origin]
        return []

    def call(self, step: CallStep, inputs: Mapping[str, str], lines: list[str]) -> list[str]:
        """Return the lines that project, call the kernel, and project back."""
        adapted, number = self.adapted[step.build], step.number
        given, codes = copies_of(step.problem, inputs)
        own = [given[name] for name in INPUTS]
        with torch.no_grad():
            heads = [adapted._heads(x, role) for x, role in zip(own, "qkv", strict=True)]
        names = [f"{role}_{number}" for role in "qkv"]
        if self.heads_alone:
            lines += [f"{name} = {literal(x)}" for name, x in zip(names, heads, strict=True)]
            before = []
        else:
            before = [self._heads(step, adapted, inputs, given, role) for role in "qkv"]
        known = dict(zip(map(id, heads), names, strict=True)) | codes
        parameters = inspect.signature(function_of(self.adapter.kernel)).parameters
        write = self.arguments_code(step, known, parameters, lines)
        target = adapted.kernel
        if not adapted.axes.takes_all_heads:
            target = adapted.axes.unpacked(adapted.kernel)

        def call_code(args: Sequence[Any], named: Mapping[str, Any]) -> str:
            return self._called(adapted, names, write(args, named), [*args, *named.values()])

        recorder = Recorder(target, call_code)
        output = self._output(recorder, adapted, step, heads, given.get("mask"))
        if not recorder.code:
            raise InexpressibleError("its adapter, and not the kernel, refuses the call")
        before = self._switched(step) + before
        if not recorder.ended:
            return [*before, f"output_{number} = {recorder.code}"]
        return before + self._result(step, adapted, recorder, output, own[0])

    def _switched(self, step: CallStep) -> list[str]:
        """Return the line that switches a kernel that is a module to its mode."""
        if not isinstance(self.adapter.kernel, nn.Module):
            return []
        return [switched("kernel", step.mode)]

    def _heads(
        self,
        step: CallStep,
        adapted: KernelAttention,
        inputs: Mapping[str, str],
        given: Mapping[str, Tensor],
        role: str,
    ) -> str:
        """Return the line that gives the heads of an input, as they lie in memory."""
        name = dict(zip("qkv", INPUTS, strict=True))[role]
        projected = self._project(step, inputs[name], role)
        code = rearranged(
            projected, "b l (h d)", adapted.axes.heads, {"d": adapted.config.width_of(role)}
        )
        if adapted.contiguous:
            code += ".contiguous()"
        elif not given[name].is_contiguous() and len(adapted.axes.heads.split()) == 4:
            code = _laid_out(code, adapted.axes.heads, role)
        return f"{role}_{step.number} = {code}"

    def _project(self, step: CallStep, code: str, role: str) -> str:
        """Return the code of an input after its projection, if there is one."""
        weights = self.builds[step.build].weights
        if not self.builds[step.build].config.projected:
            return code
        arguments = [code]
        for weight in (getattr(weights, f"w_{role}"), getattr(weights, f"b_{role}")):
            if weight is not None:
                arguments.append(name_tensor(weight, role, self.names, []))
        return f"{LINEAR}({', '.join(arguments)})"

    def _called(
        self,
        adapted: KernelAttention,
        names: Sequence[str],
        codes: Sequence[str],
        values: Sequence[Any],
    ) -> str:
        """Return the call of the kernel, which may take one tensor of several, or a single head.

        names: of query, key and value.
        codes, values: of the arguments.
        """
        axes = adapted.axes
        if axes.takes_all_heads:
            return f"{self.kernel}({', '.join(codes)})"
        if axes.packed:
            apart = 0 if axes.packed == "3" else 1  # the query, beside keys and values in one
            together = ", ".join(names[apart:])
            packed = f"torch.stack(({together}), {axes.stacked})"
            options = [code for code in codes if code.rpartition("=")[2] not in names]
            return f"{self.kernel}({', '.join([*names[:apart], packed, *options])})"
        if axes.one_query:
            raise InexpressibleError("its adapter calls it for each query")
        axis = next(x for x in values if isinstance(x, Tensor)).ndim
        of_a_head = []
        for code, x in zip(codes, values, strict=True):
            has_heads = isinstance(x, Tensor) and x.ndim == axis
            of_a_head.append(f"{code}[i]" if has_heads else code)
        one_head = f"{self.kernel}({', '.join(of_a_head)})"
        return f"torch.stack([{one_head} for i in range(len({names[0]}))])"

    def _output(
        self,
        recorder: Recorder,
        adapted: KernelAttention,
        step: CallStep,
        heads: Sequence[Tensor],
        mask: Tensor | None,
    ) -> Any:
        """Call the kernel through its adapter; return what that returns, None where it raises."""
        options = step.problem.options.change(mask=mask, need_weights=step.need_weights)
        if isinstance(self.adapter.kernel, nn.Module):
            self.adapter.kernel.train(MODES[step.mode].training)
        shape = heads[0].shape if adapted.axes.context == adapted.axes.heads else None
        with MODES[step.mode].enter(self.session.case.device):
            try:
                returned = adapted.call(recorder, *heads, **options.arguments)
                return as_output(returned, shape, lse=self.adapter.claims.lse)
            except InexpressibleError:
                raise
            except (Exception, SystemExit):
                return None

    def _result(
        self,
        step: CallStep,
        adapted: KernelAttention,
        recorder: Recorder,
        output: Any,
        query: Tensor,
    ) -> list[str]:
        """Return the lines of the call, of what is taken of its result, and of the output."""
        context, lse = f"context_{step.number}", f"lse_{step.number}"
        wanted = {context: output.output, **self._mentioned(step, output)}
        if adapted.axes.one_by_one and not isinstance(recorder.returned, Tensor):
            raise InexpressibleError("its kernel returns several tensors for each head")
        lines = taken(recorder.code, recorder.returned, wanted)
        if step.upstream is not None and (self.adapter.contiguous or not query.is_contiguous()):
            lines += _with_hook(context, self.adapter.contiguous)
        known = {"h": adapted.config.n_heads}
        joined = rearranged(context, adapted.axes.context, "b l (h d)", known)
        declared = self.adapter.claims.lse
        if declared and lse in wanted:
            lines.append(f"{lse} = {rearranged(lse, declared.axes, 'b h l', known)}")
        if self.heads_alone and adapted.config.projected:
            self._name_output_weights(step, lines)
        return [*lines, f"output_{step.number} = {self._project(step, joined, 'o')}"]

    def _mentioned(self, step: CallStep, output: Any) -> dict[str, Any]:
        """Return what else the call returned and the script mentions, by its names."""
        others = {f"weights_{step.number}": output.weights, f"lse_{step.number}": output.lse}
        return {name: x for name, x in others.items() if x is not None and self.mentions(name)}

    def _name_output_weights(self, step: CallStep, lines: list[str]) -> None:
        """Add the lines that give the weights of the output projection."""
        adapted_weights = self.builds[step.build].weights
        for name in ("w_o", "b_o"):
            value = getattr(adapted_weights, name)
            if value is not None:
                name_tensor(value, f"{name}_{step.build}", self.names, lines)

    def weight_gradient(self, number: int, name: str) -> str:
        """Return the code of the gradient of a weight of the projections."""
        return f"{self.names[id(getattr(self.builds[number].weights, name))]}.grad"

    def parameters_code(self, number: int) -> str:
        """Return the code of the weights of the projections."""
        names = [self.names[id(x)] for _, x in self.builds[number].weights.named()]
        return f"({', '.join(names)},)"


def _laid_out(code: str, axes: str, role: str) -> str:
    """Return the code of heads that do not lie in memory as projections do, as the adapter does."""
    if role == "q":
        if code.endswith(".transpose(1, 2)") or axes != "b l h d":
            return f"{code}.contiguous()"
        return _as_transposed(code)
    axis = axes.split().index("l")
    padding = (*(0, 0) * (3 - axis), 0, 1)
    room = f"torch.nn.functional.pad({code}, {padding}, value=nan)"
    return f"{room}.narrow({axis}, 0, {code}.shape[{axis}])"


def _as_transposed(code: str) -> str:
    return f"{code}.transpose(1, 2).contiguous().transpose(1, 2)"


def _with_hook(context: str, contiguous: bool) -> list[str]:
    """Return the lines that lay out the gradient of the context as the adapter does."""
    changed = _as_transposed("x")
    if contiguous:
        changed = "x.contiguous()"
    return [f"if {context}.requires_grad:", f"    {context}.register_hook(lambda x: {changed})"]
