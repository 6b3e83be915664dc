"""A module in a script: built by its own constructor, and called as it is called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep
from mha.conformance.scripts.calls import Recorder, Writer, copies_of, taken
from mha.conformance.scripts.literals import by_name, literal, name_tensor, switched
from mha.conformance.scripts.terms import (
    InexpressibleError,
    config_lines,
    dict_code,
    is_default,
    made_code,
    value_code,
)
from mha.conformance.scripts.watched_config import Reads, watched
from mha.conformance.scripts.weights import Stored, gradient_code, path_code, stored, weight_codes
from mha.implementations.adapters.axes_of_inputs import TO_LAYOUT
from mha.implementations.adapters.calling import CallByName
from mha.implementations.adapters.configs import AnyConfig
from mha.implementations.adapters.construction import Room, fixed_dropout, parameters_of
from mha.implementations.adapters.module import ModuleAttention, ModuleImplementation
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.widened import Widened
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.resolve import original_of

# What is done to an input in each layout, and to the output, as code.
TO_CODE = {
    "b l d": "",
    "l b d": ".transpose(0, 1)",
    "b d l": ".transpose(1, 2)",
    "b d l 1": ".transpose(1, 2).unsqueeze(3)",
    "b l 1 d": ".unsqueeze(2)",
    "b 1 l d": ".unsqueeze(1)",
}
FROM_CODE = {
    **TO_CODE,
    "b d l 1": ".squeeze(3).transpose(1, 2)",
    "b l 1 d": ".squeeze(2)",
    "b 1 l d": ".squeeze(1)",
}
EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
REFUSES = "its adapter, and not the class, refuses the {}"
# Where the module has flattened an image.
FLATTENED_CODE = {"b d l 1": ".transpose(1, 2)"}


class ModuleWriter(Writer):
    """Writes what is done with a module that `from_module` adapts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        original = original_of(self.session.implementation)
        assert isinstance(original, ModuleImplementation)
        self.adapter = original
        # By the number of the step that built them.
        self.adapted: dict[int, ModuleAttention] = {}
        self.modules: dict[int, nn.Module] = {}
        self.reads: dict[int, Reads] = {}
        # What the parameters of a config are given, once all calls have read it.
        self.open: dict[int, tuple[Mapping[str, Any], str]] = {}

    def build(self, step: BuildStep) -> list[str]:
        """Return the lines that build a module and load its weights."""
        name, number = f"attention_{step.number}", step.number
        given, adapted = self._adapted(step)
        self.reads[number] = Reads()
        lines = list[str]()
        made = self._made(number, given, lines)
        lines.append(f"{name} = {made}{self._moved()}")
        own = {key: watched(value, self.reads[number]) for key, value in given.items()}
        if adapted is None:  # the constructor raises, or what it made cannot be loaded
            with suppress(Exception, SystemExit):
                self._constructed(own, 1)
            return lines
        self.adapted[number] = adapted
        module, other = self._constructed(own, 1), self._constructed(given, 2)
        self.modules[number] = module
        layers = dict(module.named_modules())
        lines += self._left_out(name, layers)
        dropped = [path for path, layer in layers.items() if layer in fixed_dropout(module)]
        if not step.config.drops:
            for path in dropped:
                layers[path].p = 0.0
                lines.append(f"{path_code(name, path)}.p = 0.0  # judged without dropout")
        lines += self._loaded(step, adapted, module, other)
        if not self.adapter.claims.gradients:
            lines.append(f"{name}.requires_grad_(False)")
        if adapted.project is not None:
            lines += self._projection(step)
        return lines

    def _left_out(self, name: str, layers: Mapping[str, nn.Module]) -> list[str]:
        """Return the lines that put the identity in the place of what is not attention.

        layers: the parts of the module, after that.
        """
        left_out, lines = self.adapter.left_out, list[str]()
        for path in left_out.neutral:
            if not isinstance(layers.get(path), nn.Identity):
                raise InexpressibleError(f"its declaration leaves {path} out")
            lines.append(f"{path_code(name, path)} = torch.nn.Identity()")
        if left_out.residual:
            raise InexpressibleError("its declaration leaves a residual connection out")
        return lines

    def _adapted(self, step: BuildStep) -> tuple[Mapping[str, Any], ModuleAttention | None]:
        """Return what the constructor is given, and the module, None where building it raises."""
        case = self.session.case
        longest, items = max(case.L, case.S), case.B
        for each in self.session.steps:
            if isinstance(each, CallStep):
                count, _, *lengths = each.problem.shape
                longest, items = max(longest, *lengths), max(items, count)
        dtype, adapted, place = getattr(torch, case.dtype), None, -1
        noted: list[Mapping[str, Any]] = []
        adapter = replace(self.adapter, room=Room.for_calls(longest, items), noted=noted)
        try:
            adapted = adapter.build(step.config, step.weights, dtype=dtype, device=case.device)
        except (Exception, SystemExit) as error:
            if not noted:
                raise InexpressibleError(REFUSES.format("configuration")) from None
            if not isinstance(error, ImplementationError):
                place = 0  # of the constructor's errors, the first counts
        given = dict(noted[place])
        constructor = self.adapter.constructor
        if isinstance(constructor, Widened):
            given = constructor.passed(given)
        return given, adapted

    def _constructor(self) -> Any:
        constructor: Any = self.adapter.constructor
        if isinstance(getattr(constructor, "func", None), Widened):
            raise InexpressibleError(
                "its constructor is given widths and an option that inference has found"
            )
        if isinstance(constructor, Widened):
            return constructor.cls
        return constructor

    def _constructed(self, given: Mapping[str, Any], seed: int) -> nn.Module:
        torch.manual_seed(seed)
        case = self.session.case
        module: nn.Module = self._constructor()(**given)
        self.adapter.left_out.replace_parts(self.adapter.name, module)
        return module.to(device=case.device, dtype=getattr(torch, case.dtype))

    def _made(self, number: int, given: Mapping[str, Any], lines: list[str]) -> str:
        """Return the call of the constructor, without the arguments that are its defaults."""
        parameters = parameters_of(self._constructor())
        codes: dict[str, str] = {}
        for name, value in given.items():
            if name in parameters and is_default(value, parameters[name].default):
                continue
            if type(value) in (AnyConfig, dict):  # which of its values are read is known at the end
                values = value if isinstance(value, dict) else vars(value)
                self.open[number] = values, type(value).__name__
                codes[name] = f"config_{number}"
            elif self.adapter.arguments.get(name) == "config":
                codes[name], before = config_lines(value, f"config_{number}", self.imports)
                lines += before
            else:
                codes[name] = value_code(value, self.imports)
        return made_code(self._constructor(), codes, self.imports)

    def _moved(self) -> str:
        """Return the code that moves a module to the dtype and the device."""
        case, places = self.session.case, dict[str, str]()
        if case.dtype != "float32":
            places["dtype"] = f"torch.{case.dtype}"
        if case.device != "cpu":
            places["device"] = repr(case.device)
        if not places:
            return ""
        return f".to({by_name(places)})"

    def _loaded(
        self, step: BuildStep, adapted: ModuleAttention, module: nn.Module, other: nn.Module
    ) -> list[str]:
        """Return the lines that load the weights, and whatever else is random, by their own names.

        module, other: constructed with two seeds, so that they are alike in what is not random.
        """
        name, lines = f"attention_{step.number}", list[str]()
        state = adapted.module.state_dict()
        fresh, again = module.state_dict(), other.state_dict()
        codes, values = self._codes(step, adapted, lines), list[str]()
        for key, value in state.items():
            if not (_same(state, fresh, key) and _same(state, again, key)):
                values.append(f"    {key!r}: {codes.get(key) or _state_code(value)},")
        if values:
            part = "" if len(values) == len(state) else ", strict=False"
            lines += [f"{name}.load_state_dict({{", *values, f"}}{part})"]
        module.load_state_dict(state)
        for place in self._places(adapted):
            for key, tensor in place.tensors.items():
                if key not in state:
                    target = path_code(name, key)
                    lines += ["with torch.no_grad():", f"    {target}.copy_({_state_code(tensor)})"]
        return lines

    def _codes(self, step: BuildStep, adapted: ModuleAttention, lines: list[str]) -> dict[str, str]:
        """Return the code of what is loaded, where the script names the weights of the contract."""
        named = dict(step.weights.named())
        mentioned = any(self.mentions(f"{name}_{step.number}") for name in named)
        if not (mentioned or any(id(x) in self.names for x in named.values())):
            return {}
        names: dict[str, str] = {}
        for name, x in named.items():
            names[name] = name_tensor(x, f"{name}_{step.number}", self.names, lines)
        return weight_codes(self._places(adapted), step.weights, names)

    def _places(self, adapted: ModuleAttention) -> Sequence[Stored]:
        return [*stored(adapted.module, adapted.parameter_paths, adapted.config.head_dim)]

    def _projection(self, step: BuildStep) -> list[str]:
        """Return the lines of W_o, which the module does not have."""
        lines = ["# The output projection, which the module does not have."]
        for name in ("w_o", "b_o"):
            value: Tensor | None = getattr(step.weights, name)
            if value is not None:
                code = name_tensor(value, f"{name}_{step.number}", self.names, lines)
                lines.append(f"{code}.requires_grad_()")
        return lines

    def derive(self, step: DeriveStep) -> list[str]:
        """Return the line that makes a module of another one."""
        return [f"attention_{step.number} = {step.code.format(f'attention_{step.origin}')}"]

    def call(self, step: CallStep, inputs: Mapping[str, str], lines: list[str]) -> list[str]:
        """Return the lines of a call of a module."""
        build, mode = self.builds[step.build], MODES[step.mode]
        if build.number not in self.adapted:
            raise InexpressibleError(REFUSES.format("configuration"))
        adapted, module = self.adapted[build.number], self.modules[build.number]
        copies, codes = copies_of(step.problem, inputs)
        given = copies  # held here as long as their ids are known
        if adapted.layout != "b l d":
            given = self._laid_out(adapted.layout, copies, codes)
        name = f"attention_{step.build}"
        parameters = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
        write = self.arguments_code(step, codes, parameters, lines)
        recorder = Recorder(module, lambda args, named: f"{name}({', '.join(write(args, named))})")
        module.train(mode.training)
        output = self._output(recorder, adapted, step, given)
        if step.switches:
            lines.append(switched(name, step.mode))
        if not recorder.code:
            raise InexpressibleError(REFUSES.format("call"))
        if not recorder.ended:
            return [f"output_{step.number} = {recorder.code}"]
        return self._result(step, adapted, recorder, output)

    def _laid_out(
        self, layout: str, given: Mapping[str, Tensor], codes: dict[int, str]
    ) -> dict[str, Tensor]:
        """Return the inputs in a layout, and add their code."""
        made = {id(x): TO_LAYOUT[layout](x) for name, x in given.items() if name != "mask"}
        for key, code in [*codes.items()]:
            if key in made:
                codes[id(made[key])] = f"{code}{TO_CODE[layout]}"
        return {name: made.get(id(x), x) for name, x in given.items()}

    def _output(
        self,
        recorder: Recorder,
        adapted: ModuleAttention,
        step: CallStep,
        given: Mapping[str, Tensor],
    ) -> Any:
        """Call a module through its adapter; return what that returns, None where it raises."""
        options = step.problem.options.change(
            mask=given.get("mask"), need_weights=step.need_weights
        )
        inputs = given["query"], given["key"], given["value"]
        with MODES[step.mode].enter(self.session.case.device):
            try:
                return adapted.call(recorder, *inputs, **options.arguments)
            except InexpressibleError:
                raise
            except (Exception, SystemExit):
                return None

    def _result(
        self, step: CallStep, adapted: ModuleAttention, recorder: Recorder, output: Any
    ) -> list[str]:
        """Return the lines of a call, and of what is taken of its result."""
        name, weights = f"output_{step.number}", f"weights_{step.number}"
        call = adapted.call
        assert isinstance(call, CallByName)
        found = as_output(output.output)
        wanted = {name: found.output}
        if self.mentions(weights) and output.weights is not None and not self.adapter.weights:
            wanted[weights] = output.weights
        lines = taken(recorder.code, recorder.returned, wanted)
        chain = self._back(adapted, found.output)
        if chain and len(lines) == 1 and lines[0].startswith(f"{name} = "):
            lines = [f"{lines[0]}{chain}"]
        elif chain:
            lines.append(f"{name} = {name}{chain}")
        if adapted.project is not None:
            lines.append(f"{name} = torch.nn.functional.linear({name}, {self._projected(step)})")
        if self.adapter.weights and self.mentions(weights):
            lines.append(f"{weights} = attention_{step.build}.{self.adapter.weights}")
        return lines

    def _back(self, adapted: ModuleAttention, output: Any) -> str:
        """Return the code that brings an output back to the layout of the contract."""
        if not isinstance(output, Tensor):
            return ""
        flattened = adapted.layout.count(" ") == 3 and output.ndim != 4
        if flattened:
            return FLATTENED_CODE.get(adapted.layout, "")
        return FROM_CODE.get(adapted.layout, "")

    def _projected(self, step: CallStep) -> str:
        weights = self.builds[step.build].weights
        given = filter(lambda x: x is not None, (weights.w_o, weights.b_o))
        return ", ".join(self.names[id(x)] for x in given)

    def weight_gradient(self, number: int, name: str) -> str:
        """Return the code of the gradient of a weight, by the name it has in the module."""
        build = self.builds[number]
        adapted = self.adapted[build.number]
        if adapted.project is not None and name in ("w_o", "b_o"):
            return f"{self.names[id(getattr(build.weights, name))]}.grad"
        return gradient_code(self._places(adapted), name, f"attention_{number}", build.weights)

    def parameters_code(self, number: int) -> str:
        """Return the code of the parameters of a module."""
        return f"attention_{number}.parameters()"

    def open_lines(self) -> list[str]:
        """Return the lines that define configs, with what was read of them."""
        return [self._config(number) for number in self.open]

    def _config(self, number: int) -> str:
        (values, kind), reads = self.open[number], self.reads[number]
        used = reads.attributes | reads.items
        if reads.attributes and reads.items:
            raise InexpressibleError("its config is read as an object and as a dictionary")
        codes: dict[str, str] = {}
        for name, value in values.items():
            if name in used:
                codes[name] = value_code(value, self.imports)
        if kind == "dict" or reads.items:
            return f"config_{number} = {dict_code(codes)}"
        return f"config_{number} = types.SimpleNamespace({by_name(codes)})"


def _same(state: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Return whether another module has the same tensor, to the bit, or an object of that type."""
    x, y = state[key], other.get(key)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y)
    if is_lazy(y) or x.shape != y.shape:
        return False
    if x.equal(y):
        return True
    return x.is_floating_point() and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _state_code(value: Tensor) -> str:
    """Return the code of a tensor that is copied, without a dtype that float32 includes."""
    code = literal(value.detach().contiguous())
    if code.startswith("tensor(") and value.dtype in EXACT_IN_FLOAT32:
        return code.replace(f", dtype={value.dtype})", ")")
    return code
