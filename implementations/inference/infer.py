"""`infer`: a plain module class as an implementation, with a report on how it was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from textwrap import indent
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mha.implementations.adapters.construction import (
    SHORT,
    Room,
    assumed_arguments,
    construct,
    constructor_arguments,
)
from mha.implementations.adapters.constructor_names import without_partial
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.adapters.names import PAIRED
from mha.implementations.adapters.widened import OneHead
from mha.implementations.adapters.widths import (
    reads_no_number_of_heads,
    with_one_head,
    with_other_widths,
)
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.biases import biases_of_arguments
from mha.implementations.inference.building import (
    built,
    kernel_advice,
    require_forward,
    trial_config,
)
from mha.implementations.inference.candidate import (
    Candidate,
    may_need_a_gpu,
    on_a_gpu,
    without_gradients,
)
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.describe import rows_of_module
from mha.implementations.inference.nearest_projections import EachCallRaises
from mha.implementations.inference.probes import FEW_DTYPES, each_once, is_close
from mha.implementations.inference.projections import Asked, Unclear, Undeclarable
from mha.implementations.inference.questions import require_scale_of_class
from mha.implementations.inference.refusals import refusal
from mha.implementations.inference.rows import WIDTH, Row, table
from mha.implementations.inference.search import with_claims
from mha.implementations.inference.sizes import in_whole_tiles
from mha.implementations.inference.understanding import claims_of_heads, has_one_head, understand
from mha.implementations.inference.unused import unused_options
from mha.implementations.process.pristine import pristine
from mha.implementations.process.torch_state import threads

# More than the widths of a head that are usual: a class may have d_model / 64 heads.
WIDE = 512
# A module for trial runs, and how it was understood.
Read = tuple[nn.Module, Candidate]


@dataclass(frozen=True)
class Inference:
    """A class, or a function, as it was understood.

    implementation: what to judge.
    rows: what was found, and how.
    declaration: the code that declares the same.
    kind: which of the two it is.
    not_covered: options that are not judged.
    """

    implementation: ModuleImplementation | KernelImplementation
    rows: tuple[Row, ...]
    declaration: str
    kind: Literal["class", "function"] = "class"
    not_covered: tuple[str, ...] = ()

    def report(self, width: int = WIDTH) -> str:
        """Return what was found, as a table of at most `width` columns, and the declaration."""
        declaration = indent(self.declaration, "    ")
        return f"{table(self.rows, width)}\n\nThe same as a declaration:\n\n{declaration}"


@pristine()
@threads(1)
def infer(constructor: Callable[..., nn.Module], label: str = "") -> Inference:
    """Infer how a module is built and called, and what it supports.

    constructor: a class, a function that makes a module, or a `functools.partial` of one.
    label: its name in reports; by default its own.

    Raises ImplementationError, with what to declare, for what names, shapes and trial runs leave
    open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    made = _made(constructor)
    if getattr(made, "__init__", None) is nn.Module.__init__:  # whose parameters would mislead
        require_forward(label, made)
    module, candidate = _built_and_read(label, constructor)
    require_scale_of_class(candidate)
    declared = candidate.declared
    return Inference(
        implementation=declared.implementation(),
        rows=tuple(rows_of_module(candidate, module)),
        declaration=_declaration(declared, constructor),
        kind="class" if inspect.isclass(made) else "function",
        not_covered=tuple(unused_options(candidate)),
    )


def _made(constructor: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return the class or the function that a `functools.partial` calls."""
    return constructor.func if isinstance(constructor, partial) else constructor


def _declaration(declared: Declared, given: Callable[..., nn.Module]) -> str:
    """Return the code of a declaration; what was given may be built in another way now."""
    label, found = declared.label, declared.constructor
    options, target = dict[str, Any](), found
    if isinstance(found, partial) and found is not given:
        options, target = found.keywords, found.func
    code, more = getattr(target, "code", label), {}
    if code != label:
        more = {"name": label}
    if options:
        set_to = "".join(f", {name}={value}" for name, value in options.items())
        code = f"partial({code}{set_to})"
    return declared.code(code, **more)


def _built_and_read(label: str, constructor: Callable[..., nn.Module]) -> Read:
    """Return a module, and how it was understood.

    Raises ImplementationError for what is left open, or cannot be built.
    """
    if reads_no_number_of_heads(constructor):
        for one in with_one_head(label, constructor):
            read, _ = _explained(label, one, _arguments(label, one))
            if read:
                return read
    try:
        arguments = _arguments(label, constructor)
        if not assumed_arguments(constructor, arguments):
            return _read(label, constructor, arguments)
        read, problem = _explained(label, constructor, arguments)
        if read:
            return read
        remark = problem and f". If {_sizes(arguments)}, {problem}"
        arguments = _arguments(label, constructor, assume=False, remark=remark)
        return _read(label, constructor, arguments)
    except ImplementationError:
        others = with_other_widths(label, constructor), with_one_head(label, constructor)
        for build in chain.from_iterable(others):
            read, _ = _explained(label, build, _arguments(label, build))
            if read:
                return read
        raise


def _sizes(arguments: Mapping[str, str]) -> str:
    sizes = ("d_model", "n_heads")
    return " and ".join(f"{name} is {field}" for name, field in arguments.items() if field in sizes)


def _arguments(
    label: str, constructor: Callable[..., nn.Module], *, assume: bool = True, remark: str = ""
) -> Mapping[str, str]:
    """Return the arguments of a constructor.

    Raises ImplementationError, with advice for a kernel, and a remark.
    """
    try:
        return constructor_arguments(label, constructor, assume=assume)
    except ImplementationError as error:
        advice = kernel_advice(label, _made(constructor))
        raise ImplementationError(f"{error}{advice}{remark}") from None


def _explained(
    label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]
) -> tuple[Read | None, str]:
    """Return a module and how it was understood, if a formula gives its outputs.

    Beside it, what reading a module raised that could be built.
    """
    try:
        module = built(label, constructor, arguments)
    except ImplementationError:
        return None, ""
    try:
        candidate = _first_found(_unread(label, constructor, arguments, module), module)
    except ImplementationError as error:
        return None, str(error)
    is_sure = candidate.explained
    if candidate.config.n_heads == 1:
        is_sure = candidate.evidence == "tested" or has_one_head(module)
        is_sure = is_sure and _ignores_number_of_heads(candidate) and _has_one_if_wide(candidate)
    if not is_sure:
        return None, ""
    return (module, candidate), ""


def _ignores_number_of_heads(candidate: Candidate) -> bool:
    """Return whether a class with one head gives the same if a config says that there are two.

    Its base, or one of its parts, may read their number.
    """
    one = without_partial(candidate.declared.constructor)
    if not isinstance(one, OneHead) or "config" not in candidate.arguments.values():
        return True
    set_to = candidate.declared.keywords
    cls, two = partial(one.cls, **set_to), replace(candidate.config, n_heads=2)
    arguments = {**candidate.arguments}
    del arguments[one.n_heads]

    class WithTwoHeads(OneHead):
        def __call__(self, **_: Any) -> nn.Module:
            return construct(cls, arguments, two, room=Room(SHORT))

    told = candidate.declaring(constructor=partial(WithTwoHeads(**vars(one)), **set_to))
    inputs = candidate.probes[0].inputs
    usual, other = candidate.call_plainly(inputs), told.call_plainly(inputs)
    return bool(usual and other and is_close(other.output, usual.output))


def _has_one_if_wide(candidate: Candidate) -> bool:
    """Return whether a class has one head where d_model is large, which may decide how many."""
    wide = candidate.trying(changes={**candidate.trial.changes, "d_model": WIDE})
    draw = torch.Generator().manual_seed(0)

    def widened(x: Tensor) -> Tensor:
        return torch.randn(*x.shape[:-1], WIDE, generator=draw, dtype=x.dtype)

    inputs = each_once(widened, candidate.probes[0].inputs)
    result = wide.call_plainly(inputs)
    return result is None or is_close(result.output, wide.formula(inputs, wide.weights, None))


def _read(label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]) -> Read:
    """Return a module built with these arguments, as it was understood.

    Raises ImplementationError.
    """
    module = built(label, constructor, arguments)
    return module, _first_found(_unread(label, constructor, arguments, module), module)


def _unread(
    label: str,
    constructor: Callable[..., nn.Module],
    arguments: Mapping[str, str],
    module: nn.Module,
) -> Candidate:
    """Return what is known before any trial run."""
    others = biases_of_arguments(constructor, arguments, module)
    claims = claims_of_heads(module, trial_config(constructor).n_heads)
    declared = Declared(constructor, label, claims=claims, arguments=others)
    return Candidate(declared, arguments={**arguments, **others})


def _first_found(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate for a module, with its claims.

    If need be, it is one that takes few dtypes or lengths, no gradients, or a GPU.

    Raises ImplementationError, with what to declare, for what is left open in each of these.
    """
    problems = list[Unclear]()
    for tried in (empty, empty.trying(dtype=torch.float32), without_gradients(empty)):
        try:
            return with_claims(_understood(tried, module))
        except Undeclarable as error:
            raise ImplementationError(f"{empty.label} cannot be judged as it is: {error}") from None
        except Asked as question:
            raise ImplementationError(f"{empty.label} needs a declaration: {question}") from None
        except Unclear as unclear:
            problems.append(unclear)
    if not isinstance(problems[0], EachCallRaises):
        raise refusal(empty, module, problems)
    for tried in _others(empty):
        try:
            return with_claims(_understood(tried, module))
        except Unclear as unclear:
            problems.append(unclear)
    if may_need_a_gpu(empty):
        return _first_found(on_a_gpu(empty), module)
    raise refusal(empty, module, problems)


def _understood(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate that gives what a module computes; the adapter may add W_o to one head.

    A single head without W_o is part of an attention that has it elsewhere.

    Raises as `understand` does.
    """
    found = understand(empty, module)
    parameters = dict(found.declared.parameters)
    if found.config.n_heads > 1 or parameters.get("w_o", "") is not None:
        return found
    del parameters["w_o"]
    formula = replace(found.formula, projected=True)
    return found.declaring(parameters=parameters).trying(formula=formula)


def _others(empty: Candidate) -> Iterator[Candidate]:
    """Yield what else a module may be whose calls raise.

    It may take rotations of pairs, half precision, or few lengths.
    """
    if {*PAIRED}.intersection(empty.signature.others):
        yield empty.declaring(rotation_pairs=True)
    for dtype in FEW_DTYPES[1:]:
        yield empty.trying(dtype=dtype)
    square = empty.claiming(cross_attention=False)
    yield square
    yield in_whole_tiles(empty)
    yield in_whole_tiles(square)
