"""Where a module has the four projections, from the names and shapes of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mha.implementations.adapters.loading import STACKED, ParameterPath, groups_of
from mha.implementations.adapters.names import words_of
from mha.spec import Config

ParameterMap = dict[str, ParameterPath]
INPUTS = {"q": "query", "k": "key", "v": "value"}
# Of stacked projections, without a word on their order.
STACKED_WORDS = ("cattn", "inproj")
# The words that name a role, as they stand between the underscores, digits, capitals and dots of a
# name.
ROLE_WORDS = {
    **{
        order: (order, f"w{order}", f"to{order}", "".join(INPUTS[role] for role in order))
        for order in STACKED
    },
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
# Of the rows of stacked projections, beside the contract's (r h e): by heads.
STACKED_ORDERS = ("(h r e)", "(h e r)")
# The same with the columns of all heads interleaved.
INTERLEAVED_ORDERS = ("(r e h)", "(e r h)", "(e h r)")
BIAS_WORDS = ("b", "bias", "biases")
FEWER_KEY_HEADS = (
    "there are fewer key heads than query heads; let the constructor take the number of key heads"
    " as n_kv_heads, also where that is n_heads, or let all heads share one key and one value"
)
SHARED_BY_HEADS = (
    "all heads share one small projection; project all of d_model, and split the result into heads"
)


class Unclear(Exception):
    """What could not be inferred, and what to declare instead."""


class Undeclarable(Unclear):
    """What no declaration can say either."""


@dataclass(frozen=True)
class Held:
    """A parameter, a linear layer, or the layers of all heads in a list, at a path as `from_module`
    takes it.

    shape: of the parameter or weight; rows of several layers are added up. kind: "w" or "b".
    is_layer: not a parameter.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    is_layer: bool


def role_of(name: str) -> str | None:
    """Return the role that a dotted name gives to a parameter: "q", "k", "v", "o", one of
    `STACKED`, or None.

    >>> role_of("attn.W_query"), role_of("c_attn"), role_of("q_norm")
    ('q', 'qkv', None)
    """
    if any(word in OTHER_WORDS for word in words_of(name)):
        return None
    return _role_by_words(name.rpartition(".")[2]) or _role_by_words(name)


def _role_by_words(name: str) -> str | None:
    words = words_of(name)
    joined = "".join(word for word in words if word not in ("weight", "bias"))
    for candidates in ([word for word in words if word not in NEUTRAL_WORDS], [joined], words):
        roles = [
            role for role, known in ROLE_WORDS.items() if any(word in known for word in candidates)
        ]
        if len(roles) == 1:
            return roles[0]
    return None


def possible_paths(module: nn.Module, config: Config) -> dict[str, list[ParameterPath]]:
    """Return, for each key of a map ("w_q", "w_qkv", "b_o", ...), the path and possible layouts of
    its weight.

    Raises Unclear if a shape does not fit the role in the name, or if two names have the same role.
    """
    if any(map(is_parametrized, module.modules())):
        raise Undeclarable(
            "its weights are computed each time (a parametrization); judge it without that"
        )
    paths: dict[str, list[ParameterPath]] = {}
    in_order = _in_order(module)
    for held, role in _with_roles([*_but_output_lists(_held(module), in_order)], config):
        key = f"{held.kind}_{role}"
        patterns = _patterns(held, role, config)
        if not patterns:
            raise _misfit(held, key, config)
        if key in paths:
            raise Unclear(f"{held.path} and {_name_of(paths[key][0])} both look like {key}")
        paths[key] = [(held.path, pattern) if pattern else held.path for pattern in patterns]
    named = {role for key in paths for role in key[2:]}
    return paths if named & INPUTS.keys() else in_order | paths


def _but_output_lists(
    every: Iterator[Held], in_order: Mapping[str, list[ParameterPath]]
) -> Iterator[Held]:
    """Yield all but a list of the layers in order that is called like an output projection, as proj
    is.
    """
    lists = {str(path).rpartition(".")[0] for (path,) in in_order.values()}
    yield from (held for held in every if held.path not in lists or role_of(held.path) != "o")


def _with_roles(every: list[Held], config: Config) -> Iterator[tuple[Held, str]]:
    """Yield what has a role by its name, and the one matrix that has the shape of all inputs that
    no name is of.

    It may be called proj, like many an output projection, which has another shape.
    """
    roles = {held.path: role_of(held.path) for held in every}
    named = "".join(filter(None, roles.values()))
    stacked = "".join(role for role in INPUTS if role not in named)
    fitting = [
        held.path
        for held in every
        if roles[held.path] in (None, "o") and _holds(held, stacked, config)
    ]
    roles |= {fitting[0]: stacked} if len(fitting) == 1 else {}
    for held in every:
        if role := roles[held.path]:
            yield held, role


def _holds(held: Held, stacked: str, config: Config) -> bool:
    """Return whether it is a matrix of the shape of several projections, and not of one."""
    rows, columns = _shared_rows(stacked, config) or len(stacked) * config.d_model, config.d_model
    if held.kind == "b" or stacked not in STACKED or rows == columns:
        return False
    return held.shape == (rows, columns) or (held.shape == (columns, rows) and not held.is_layer)


def _misfit(held: Held, key: str, config: Config) -> Unclear:
    """Return what is wrong with the shape of a parameter of a role."""
    d, roles, rows = config.d_model, key[2:], held.shape[0] if len(held.shape) == 2 else 0
    shape = f"{held.path} looks like {key}, but its shape is {held.shape}"
    if held.kind == "w" and held.shape == (config.head_dim, config.head_dim):
        return Undeclarable(
            f"{shape} with d_model={d} and n_heads={config.n_heads}, so {SHARED_BY_HEADS}"
        )
    if (
        held.kind == "w"
        and not {"k", "v"}.isdisjoint(roles)
        and rows < len(roles) * d
        and not rows % config.head_dim
    ):
        return Undeclarable(
            f"{shape} with d_model={d} and n_heads={config.n_heads}, so {FEWER_KEY_HEADS}"
        )
    expected = (len(roles) * d, d) if held.kind == "w" else (len(roles) * d,)
    return Unclear(f"{shape}, not {expected} as with d_model={d}")


def parameter_maps(module: nn.Module, config: Config) -> list[ParameterMap]:
    """Return every map of the projections that the names and shapes allow; several differ in
    layouts, or in W_o.

    Raises Unclear if there is no projection of query, key or value.
    """
    paths = possible_paths(module, config)
    roles = {role for key in paths if key.startswith("w_") for role in key[2:]}
    missing = sorted({"q", "k", "v"} - roles)
    if missing:
        names = ", ".join(name for name, _ in module.named_parameters()) or "none"
        raise Unclear(
            f"no parameter looks like the projection of {', '.join(missing)} (its parameters:"
            f" {names})"
        )
    if "o" not in roles:
        paths["w_o"] = [*_squares(module, config, paths), None]
    maps = [dict(zip(paths, chosen, strict=True)) for chosen in product(*paths.values())]
    return [each for each in maps if _are_in_one_order(each)]


def _are_in_one_order(parameters: ParameterMap) -> bool:
    """Return whether flat biases of stacked projections are in the order of the weights beside
    them.
    """
    orders = {key: _order(path) for key, path in parameters.items() if key[2:] in STACKED}
    pairs = [
        (order, orders.get(f"w{key[1:]}", "")) for key, order in orders.items() if key[:2] == "b_"
    ]
    return all(bias == weight for bias, weight in pairs if bias and weight)


def _order(path: ParameterPath) -> str:
    """Return the order of the rows of stacked projections, such as "(h r e)"; "" if they are not
    one axis.
    """
    if path is None or isinstance(path, str):
        return "(r h e)"
    rows = re.search(r"-> .*(\(. . .\))", path[1])
    return rows[1] if rows else ""


def _squares(
    module: nn.Module, config: Config, paths: Mapping[str, list[ParameterPath]]
) -> Iterator[ParameterPath]:
    """Yield the square matrices without a role, one of which may be W_o under another name: trial
    runs decide.
    """
    used = [_name_of(path) for options in paths.values() for path in options]
    for held in _held(module):
        if held.kind == "w" and held.path not in used and not role_of(held.path):
            yield from (
                (held.path, pattern) if pattern else held.path
                for pattern in _patterns(held, "o", config)
            )


def reordered(parameters: ParameterMap) -> Iterator[ParameterMap]:
    """Yield the map with the stacked projections in each other order."""
    stacked = next((key[2:] for key in parameters if key[2:] in STACKED), "")
    for order in STACKED:
        if order != stacked and sorted(order) == sorted(stacked):
            yield {
                key.replace(f"_{stacked}", f"_{order}"): path for key, path in parameters.items()
            }


def interleaved(parameters: ParameterMap) -> Iterator[ParameterMap]:
    """Yield the map with interleaved columns of heads: as rows of what makes the heads, as columns
    of W_o, or both.

    Such a module computes the same with other weights. Stacked projections may be in any order.
    """
    for each in (parameters, *reordered(parameters)):
        yield from _interleaved(each)


def _interleaved(parameters: ParameterMap) -> Iterator[ParameterMap]:
    inputs = {
        key: path for key, path in parameters.items() if not {"q", "k", "v"}.isdisjoint(key[2:])
    }
    output = parameters.get("w_o")
    columns: ParameterMap = (
        {"w_o": (output, "d (h e) -> d (e h)")} if isinstance(output, str) else {}
    )
    if columns:
        yield parameters | columns
    if all(isinstance(path, str) for path in inputs.values()):
        for order in INTERLEAVED_ORDERS if any(key[2:] in STACKED for key in inputs) else ("",):
            rows: ParameterMap = {
                key: (str(path), _rows_as(order, key)) for key, path in inputs.items()
            }
            yield parameters | rows
            yield from [parameters | rows | columns] if columns else []


def _rows_as(order: str, key: str) -> str:
    """Return the layout of a weight or bias whose rows are in an order of `INTERLEAVED_ORDERS`, if
    they are stacked.
    """
    inputs = " d" if key[0] == "w" else ""
    return (
        f"(r h e){inputs} -> {order}{inputs}"
        if key[2:] in STACKED
        else f"(h e){inputs} -> (e h){inputs}"
    )


def order_against_name(parameters: ParameterMap) -> str:
    """Return the name of stacked projections that says another order than the map has; "" if none
    does.
    """
    names = ((key[2:], _name_of(path)) for key, path in parameters.items() if key[2:] in STACKED)
    said = ((order, role_of(name), name) for order, name in names if not _says_no_order(name))
    return next((name for order, role, name in said if role in STACKED and role != order), "")


def _says_no_order(name: str) -> bool:
    words = [word for word in words_of(name) if word not in ("weight", "bias")]
    return "".join(words).endswith(STACKED_WORDS)


def not_loaded(module: nn.Module, parameters: Mapping[str, ParameterPath]) -> list[str]:
    """Return the names of the parameters that a map does not fill, which keep their initial values."""
    filled = [
        re.escape(_name_of(path)).replace(r"\*", "[^.]+")
        for path in parameters.values()
        if path is not None
    ]
    loaded = re.compile(rf"({'|'.join(filled)})(\.\d+)?(\.weight|\.bias)?")
    return [name for name, _ in module.named_parameters() if not loaded.fullmatch(name)]


def _name_of(path: ParameterPath) -> str:
    return path if isinstance(path, str) else path[0] if path else "none"


def is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer, or a convolution of single positions, which computes the
    same.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return {*module.kernel_size, *module.stride, module.groups} == {1}
    return isinstance(module, nn.Linear)


def _held(module: nn.Module) -> Iterator[Held]:
    """Yield the linear layers, then the matrices and biases that are parameters of other modules."""
    layers: dict[str, Any] = {
        name: layer for name, layer in module.named_modules() if is_linear(layer)
    }
    yield from _held_layers(module, layers)
    for name, parameter in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner in layers or "norm" in type(module.get_submodule(owner)).__name__.lower():
            continue
        is_bias = any(word in BIAS_WORDS for word in words_of(last))
        if is_bias or parameter.ndim > 1:
            yield Held(name, tuple(parameter.shape), "b" if is_bias else "w", is_layer=False)


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
    """Return whether it is a list each of whose members has a linear layer, unlike one of a layer
    and its dropout.
    """
    if not isinstance(module, nn.ModuleList):
        return False
    return len(module) > 0 and all(any(map(is_linear, member.modules())) for member in module)


def _path_in_list(name: str, lists: list[str]) -> str:
    """Return the path of a layer as `from_module` takes it: "heads.*.q" for heads.0.q, "queries"
    for queries.0.
    """
    own = next((each for each in lists if name.startswith(f"{each}.")), None)
    if own is None:
        return name
    _, _, after = name.removeprefix(f"{own}.").partition(".")
    if after:
        return f"{own}.*.{after}"
    return own if role_of(own) else name


def _patterns(held: Held, role: str, config: Config) -> list[str]:
    """Return the layouts that a weight or bias of a role may have in this shape, as einops
    patterns.

    The most common is first; an empty pattern is the contract's own layout.
    """
    stacked, d = len(role), config.d_model
    shared = _shared_rows(role, config)
    if shared:
        return _shared_patterns(held, shared, d)
    if held.kind == "b":
        return _bias_patterns(held.shape, stacked, config)
    if held.shape in ((stacked * d, d), (d, stacked * d)):
        return _matrix_patterns(held, stacked, d)
    return _split_patterns(held.shape, role, config)


def _split_patterns(shape: tuple[int, ...], role: str, config: Config) -> list[str]:
    """Return the layouts of a weight with an axis for the heads, or for the stacked projections, or
    both.
    """
    contract = {"o": "d (h e)"}.get(role, "(h e) d")
    axes = [["h", "e", "d"]]
    if len(role) > 1:
        contract, axes = "(r h e) d", [["r", "h", "e", "d"], ["r", "(h e)", "d"]]
    d_model = config.d_model
    sizes = {
        "d": d_model,
        "h": config.n_heads,
        "e": config.head_dim,
        "(h e)": d_model,
        "r": len(role),
    }
    orders = [order for each in axes for order in permutations(each)]
    return [
        f"{contract} -> {' '.join(order)}"
        for order in orders
        if shape == tuple(sizes[axis] for axis in order)
    ]


def _shared_rows(role: str, config: Config) -> int:
    """Return the rows of what holds a key or value that all heads share; 0 if it holds none."""
    if config.kv_heads == config.n_heads or {"k", "v"}.isdisjoint(role):
        return 0
    return sum(
        config.head_dim * (config.kv_heads if each in "kv" else config.n_heads) for each in role
    )


def _shared_patterns(held: Held, rows: int, d: int) -> list[str]:
    """Return the layouts of what has so many rows: its own, or transposed if it is a parameter of
    one role.
    """
    if held.shape in ((rows,), (rows, d)):
        return [""]
    return (
        ["o i -> i o"] if held.shape == (d, rows) and held.kind == "w" and not held.is_layer else []
    )


def _bias_patterns(shape: tuple[int, ...], stacked: int, config: Config) -> list[str]:
    h, e = config.n_heads, config.head_dim
    contract = "(r h e)" if stacked > 1 else "(h e)"
    d = config.d_model
    known = {
        (stacked * d,): contract,
        (stacked, d): "r (h e)",
        (stacked, h, e): "r h e",
        (h, e): "h e",
    }
    axes = known.get(tuple(size for size in shape if size != 1))
    if axes is None:
        return []
    if axes == contract and len(shape) == 1:
        return ["", *(f"{contract} -> {order}" for order in STACKED_ORDERS if stacked > 1)]
    named = iter(groups_of(axes))
    return [f"{contract} -> {' '.join('1' if size == 1 else next(named) for size in shape)}"]


def _matrix_patterns(held: Held, stacked: int, d: int) -> list[str]:
    orders = ("", *STACKED_ORDERS) if stacked > 1 else ("",)
    patterns = []
    if held.shape == (stacked * d, d):
        patterns += [f"(r h e) d -> {order} d" if order else "" for order in orders]
    if (
        held.shape == (d, stacked * d) and not held.is_layer
    ):  # a parameter may be multiplied from either side
        patterns += [
            f"(r h e) d -> d {order or '(r h e)'}" if stacked > 1 else "o i -> i o"
            for order in orders
        ]
    return patterns


def _in_order(module: nn.Module) -> dict[str, list[ParameterPath]]:
    """Return the paths of query, key, value and, of four, output in a list of layers, whose names
    say nothing.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) in (3, 4) and all(map(is_linear, child)):
            return {
                f"w_{role}": [f"{name}.{index}"] for index, role in enumerate("qkvo"[: len(child)])
            }
    return {}
