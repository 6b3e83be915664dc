"""What a parameter of a module is by its name: the role of a projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mha.implementations.adapters.loading import STACKED
from mha.implementations.adapters.names import words_of

INPUTS = {"q": "query", "k": "key", "v": "value"}
# Of stacked projections, without a word on their order.
STACKED_WORDS = ("cattn", "inproj")


def _words_of_order(order: str) -> tuple[str, ...]:
    """Return the words for projections that are stacked in an order, such as "kqv"."""
    inputs = "".join(INPUTS[role] for role in order)
    return (order, f"w{order}", f"to{order}", inputs)


# The words that name a role, as they stand between the underscores, digits, capitals and dots of a
# name.
ROLE_WORDS = {
    **{order: _words_of_order(order) for order in STACKED},
    "qkv": ("qkv", "wqkv", "toqkv", "querykeyvalue", *STACKED_WORDS),
    "q": ("q", "qs", "wq", "query", "queries", "toq", "toqueries"),
    "k": ("k", "ks", "wk", "key", "keys", "tok", "tokeys"),
    "v": ("v", "vs", "wv", "val", "value", "values", "tov", "tovalues"),
    "o": (
        "o",
        "wo",
        "out",
        "output",
        "toout",
        "proj",
        "dense",
        "cproj",
        "fcout",
        "outproj",
        "concat",
        "unifyheads",
    ),
}
# A name with one of these words is not that of a projection.
OTHER_WORDS = (
    "norm",
    "ln",
    "gate",
    "rel",
    "relative",
    "pos",
    "position",
    "rotary",
    "rope",
    "lora",
    "embed",
    "embedding",
)
# Words that say nothing about the role.
NEUTRAL_WORDS = (
    "w",
    "fc",
    "to",
    "c",
    "proj",
    "linear",
    "lin",
    "weight",
    "layer",
    "projection",
    "in",
    "b",
    "bias",
    "attn",
    "dense",
)
BIAS_WORDS = ("b", "bias", "biases")


@dataclass(frozen=True)
class Held:
    """A parameter, a linear layer, or the layers of all heads in a list.

    path: as `from_module` takes it.
    shape: of the parameter or weight; rows of several layers are added up.
    kind: "w" or "b".
    is_layer: not a parameter.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    is_layer: bool


def role_of(name: str) -> str | None:
    """Return the role that a dotted name gives to a parameter: "q", "o", one of `STACKED`, or None.

    >>> role_of("attn.W_query"), role_of("c_attn"), role_of("q_norm")
    ('q', 'qkv', None)
    """
    if not {*OTHER_WORDS}.isdisjoint(words_of(name)):
        return None
    return _role_by_words(name.rpartition(".")[2]) or _role_by_words(name)


def _role_by_words(name: str) -> str | None:
    """Return the one role that the words of a name say."""
    words = words_of(name)
    telling = [word for word in words if word not in NEUTRAL_WORDS]
    joined = _joined(words)
    for known in (telling, [joined], words):
        roles = [role for role in ROLE_WORDS if not {*ROLE_WORDS[role]}.isdisjoint(known)]
        if len(roles) == 1:
            return roles[0]
    return None


def says_no_order(name: str) -> bool:
    """Return whether a name of stacked projections does not say in which order they are."""
    return _joined(words_of(name)).endswith(STACKED_WORDS)


def _joined(words: Sequence[str]) -> str:
    """Return words as one, without those for the kind of a parameter."""
    return "".join(word for word in words if word not in ("weight", "bias"))


def is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer, or the same as a convolution of single positions."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return {*module.kernel_size, *module.stride, module.groups} == {1}
    return isinstance(module, nn.Linear)


def held_by(module: nn.Module) -> Iterator[Held]:
    """Yield the linear layers, then the matrices and biases of other modules."""
    layers = dict[str, Any]()
    for name, part in module.named_modules():
        if is_linear(part):
            layers[name] = part
    yield from _held_layers(module, layers)
    for name, parameter in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner in layers or "norm" in type(module.get_submodule(owner)).__name__.lower():
            continue
        if not {*BIAS_WORDS}.isdisjoint(words_of(last)):
            yield Held(name, tuple(parameter.shape), "b", is_layer=False)
        elif parameter.ndim > 1:
            yield Held(name, tuple(parameter.shape), "w", is_layer=False)


def _held_layers(module: nn.Module, layers: Mapping[str, Any]) -> Iterator[Held]:
    """Yield the linear layers; those at the same place in each member of a list are one."""
    lists = [name for name, child in module.named_modules() if _is_list_of_layers(child)]
    groups: dict[str, list[Any]] = {}
    for name, layer in layers.items():
        groups.setdefault(_path_in_list(name, lists), []).append(layer)
    for path, (first, *rest) in groups.items():
        rows, columns = first.weight.shape[:2]
        yield Held(path, (rows * (1 + len(rest)), columns), "w", is_layer=True)


def _is_list_of_layers(module: nn.Module) -> bool:
    """Return whether it is a list whose members all have a linear layer.

    One of a layer and its dropout is none.
    """
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    return all(any(map(is_linear, member.modules())) for member in module)


def _path_in_list(name: str, lists: list[str]) -> str:
    """Return the path of a layer as `from_module` takes it.

    That is "heads.*.q" for heads.0.q, and "queries" for queries.0.
    """
    for own in lists:
        if name.startswith(f"{own}."):
            _, _, after = name.removeprefix(f"{own}.").partition(".")
            if after:
                return f"{own}.*.{after}"
            return own if role_of(own) else name
    return name
