"""What a module computes beside attention, left out: norms, functions, a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mha.implementations.discovery.errors import ImplementationError

# What stands in the place of each part: a class, or a function, that makes it; or a number.
Neutral = Mapping[str, Callable[[], Any] | float]
# The options of `from_module` that say what is left out.
LEFT_OUT = {"neutral": "neutral", "residual": "residual"}
# What functions of torch that add two tensors are called.
ADDING = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


@dataclass(frozen=True)
class LeftOut:
    """What a module computes beside attention, and is to be left out.

    neutral: what stands in the place of a part: {"norm": torch.nn.Identity} builds the module
        without its submodule norm. The name may also be that of a method, of a function in the file
        of the class, or of one of `torch.nn.functional`; these then return their first argument. A
        number is what a submodule returns, or what a parameter holds: {"gate": float("inf")}
        before a sigmoid.
    residual: whether it adds its query to its output.
    """

    neutral: Neutral = field(default_factory=dict)
    residual: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LeftOut:
        """Return what the options of `from_module` say."""
        return cls(**{name: options[name] for name in LEFT_OUT if name in options})

    def replace_parts(self, label: str, module: nn.Module) -> None:
        """Put something else in the place of submodules, methods and functions of its file.

        label: the name in messages.

        Raises ImplementationError for a name that is none of these, nor that of torch.
        """
        functions = set[str]()
        for name, make in self.neutral.items():
            owner, last = _owner_of(module, name)
            if owner is not None:
                _replace(owner, last, make)
            elif function_named(module, name):
                functions.add(name)
            elif not hasattr(nn.functional, name):
                raise ImplementationError(
                    f"{label}: neutral names {name}, which is no submodule, method or function of"
                    " it"
                )
        if functions:
            _replace_functions(module, functions)

    def during_calls(self, module: nn.Module, query: Tensor) -> TorchFunctionMode:
        """Return a context in which calls leave out functions of torch, and a residual."""
        of_torch = set[str]()
        for name in self.neutral:
            owner, _ = _owner_of(module, name)
            is_own = owner is not None or function_named(module, name)
            if not is_own and hasattr(nn.functional, name):
                of_torch.add(name)
        residual = None
        if self.residual:
            residual = query
        return _Without(frozenset(of_torch), residual)


class Constant(nn.Module):
    """Returns a number, as a tensor of as many axes as its input."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        """Return the number."""
        return x.new_full((1,) * x.ndim, self.number)


def _replace(owner: nn.Module, name: str, make: Callable[[], Any] | float) -> None:
    """Put something else in the place of a submodule, a parameter or a method."""
    part = getattr(owner, name)
    if isinstance(part, nn.Module):
        setattr(owner, name, make() if callable(make) else Constant(make))
    elif isinstance(part, Tensor) and not callable(make):
        part.data.fill_(make)
    else:
        setattr(owner, name, first)


def first(x: Any, *rest: Any, **named: Any) -> Any:
    """Return the first argument."""
    del rest, named
    return x


def _replace_functions(module: nn.Module, names: set[str]) -> None:
    """Give the methods of a module others for some functions of its file.

    Its own methods are copied, with copies of all functions of the file, so that no other object
    is changed.
    """
    copies: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        for cls in reversed(type(part).__mro__):
            for name, member in vars(cls).items():
                is_method = isinstance(member, FunctionType) and not name.startswith("__")
                if is_method and not names.isdisjoint(member.__globals__):
                    variables = copies.setdefault(id(member.__globals__), {})
                    if not variables:
                        variables.update(_copied(member.__globals__, names))
                    setattr(part, name, MethodType(_with_variables(member, variables), part))


def _copied(variables: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the variables of a file, whose functions use others for some names."""
    copies = dict(variables)
    for name, value in variables.items():
        if isinstance(value, FunctionType) and value.__globals__ is variables:
            copies[name] = first if name in names else _with_variables(value, copies)
    return copies


def _with_variables(function: FunctionType, variables: dict[str, Any]) -> FunctionType:
    """Return a copy of a function that uses other variables of its file."""
    copied = FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Without(TorchFunctionMode):
    """Leaves functions of torch, and the addition of a tensor, out of calls.

    names: of the functions; each returns its first argument.
    added: the tensor; its sum with another one is the other one.
    """

    def __init__(self, names: frozenset[str], added: Tensor | None) -> None:
        super().__init__()
        self.names = names
        self.added = added

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.names:
            return args[0]
        if self.added is not None and name in ADDING and len(args) == 2 and not kwargs:
            one, other = args
            if other is self.added and _are_alike(one, other):
                return one
            if one is self.added and _are_alike(one, other):
                return other
        return function(*args, **(kwargs or {}))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether both are tensors of one shape."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """Return the submodule that has what a dotted name says, and its name there.

    None if no submodule, parameter or method has that name: a number may have it, as a probability.
    """
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None, last
    part = getattr(owner, last, None)
    if isinstance(part, Tensor) or callable(part):
        return owner, last
    return None, last


def function_named(module: nn.Module, name: str) -> bool:
    """Return whether a method of a module, or a function of the file of one, has a name."""
    for cls in type(module).__mro__:
        for member in vars(cls).values():
            variables = getattr(member, "__globals__", {})
            if isinstance(variables.get(name), FunctionType):
                return True
    return isinstance(getattr(type(module), name, None), FunctionType)
