"""Where a module has the four projections, from the names and shapes of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mha.implementations.adapters.loading import STACKED, ParameterPath
from mha.implementations.inference.layouts import layouts_of, rows_if_shared
from mha.implementations.inference.roles import (
    INPUTS,
    Held,
    held_by,
    is_linear,
    role_of,
    says_no_order,
)
from mha.spec import Config

ParameterMap = dict[str, ParameterPath]
# Of the rows of stacked projections, with the columns of all heads interleaved.
INTERLEAVED_ORDERS = ("(r e h)", "(e r h)", "(e h r)")
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


class Asked(Unclear):
    """What the author is asked, with the code of each answer in the message."""


Paths = dict[str, list[ParameterPath]]


def possible_paths(module: nn.Module, config: Config) -> Paths:
    """Return the path and possible layouts of the weight of each key of a map, such as "w_qkv".

    Raises Unclear if a shape does not fit the role in the name, or if two names have the same role.
    """
    if any(map(is_parametrized, module.modules())):
        raise Undeclarable(
            "its weights are computed each time (a parametrization); judge it without that"
        )
    paths: Paths = {}
    in_order = _in_order(module)
    for held, role in _with_roles(_without_output_lists(module, in_order), config):
        key = f"{held.kind}_{role}"
        patterns = layouts_of(held, role, config)
        if not patterns:
            raise _misfit(held, key, config)
        if key in paths:
            raise Unclear(f"{held.path} and {_name_of(paths[key][0])} both look like {key}")
        paths[key] = _paths(held, patterns)
    named = set("".join(key[2:] for key in paths))
    if named.isdisjoint(INPUTS):
        return in_order | paths
    return paths


def _paths(held: Held, patterns: list[str]) -> list[ParameterPath]:
    """Return the paths of a parameter in several layouts, as `from_module` takes them."""
    paths: list[ParameterPath] = []
    for pattern in patterns:
        paths.append((held.path, pattern) if pattern else held.path)
    return paths


def _without_output_lists(module: nn.Module, in_order: Paths) -> list[Held]:
    """Return all but a list of the layers in order whose name is that of an output, as proj is."""
    lists = {str(path).rpartition(".")[0] for (path,) in in_order.values()}
    kept = []
    for held in held_by(module):
        if held.path not in lists or role_of(held.path) != "o":
            kept.append(held)
    return kept


def _with_roles(every: list[Held], config: Config) -> Iterator[tuple[Held, str]]:
    """Yield what has a role by its name, and the one matrix of the shape of all other inputs.

    It may be called proj, like many an output projection, which has another shape.
    """
    roles = {held.path: role_of(held.path) for held in every}
    named = "".join(filter(None, roles.values()))
    stacked = "".join(role for role in INPUTS if role not in named)
    fitting = []
    for held in every:
        if roles[held.path] in (None, "o") and _holds(held, stacked, config):
            fitting.append(held.path)
    if len(fitting) == 1:
        roles[fitting[0]] = stacked
    for held in every:
        role = roles[held.path]
        if role:
            yield held, role


def _holds(held: Held, stacked: str, config: Config) -> bool:
    """Return whether it is a matrix of the shape of several projections, and not of one."""
    columns = config.d_model
    rows = rows_if_shared(stacked, config) or len(stacked) * columns
    if held.kind == "b" or stacked not in STACKED or rows == columns:
        return False
    return held.shape == (rows, columns) or (held.shape == (columns, rows) and not held.is_layer)


def _misfit(held: Held, key: str, config: Config) -> Unclear:
    """Return what is wrong with the shape of a parameter of a role."""
    d, roles = config.d_model, key[2:]
    shape = f"{held.path} looks like {key}, but its shape is {held.shape}"
    if held.kind == "b":
        return Unclear(f"{shape}, not {(len(roles) * d,)} as with d_model={d}")
    sizes = f"{shape} with d_model={d} and n_heads={config.n_heads}"
    if held.shape == (config.head_dim, config.head_dim):
        return Undeclarable(f"{sizes}, so {SHARED_BY_HEADS}")
    rows = held.shape[0] if len(held.shape) == 2 else 0
    are_fewer = rows < len(roles) * d and rows % config.head_dim == 0
    if are_fewer and not {"k", "v"}.isdisjoint(roles):
        return Undeclarable(f"{sizes}, so {FEWER_KEY_HEADS}")
    return Unclear(f"{shape}, not {(len(roles) * d, d)} as with d_model={d}")


def parameter_maps(module: nn.Module, config: Config) -> list[ParameterMap]:
    """Return every map of the projections that the names and shapes allow.

    Several differ in layouts, or in W_o.

    Raises Unclear if there is no projection of query, key or value.
    """
    paths = possible_paths(module, config)
    roles = set("".join(key[2:] for key in paths if key.startswith("w_")))
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
    """Return whether flat biases of stacked projections are in the order of their weights."""
    for key, path in parameters.items():
        if key.startswith("b_") and key[2:] in STACKED:
            bias, weight = _order(path), _order(parameters.get(f"w_{key[2:]}", ("", "")))
            if bias and weight and bias != weight:
                return False
    return True


def _order(path: ParameterPath) -> str:
    """Return the order of the rows of stacked projections, such as "(h r e)".

    That is "" if they are not one axis.
    """
    if path is None or isinstance(path, str):
        return "(r h e)"
    rows = re.search(r"-> .*(\(. . .\))", path[1])
    return rows[1] if rows else ""


def _squares(module: nn.Module, config: Config, paths: Paths) -> Iterator[ParameterPath]:
    """Yield the square matrices without a role; trial runs decide which one is W_o."""
    used = set(map(_name_of, chain.from_iterable(paths.values())))
    for held in held_by(module):
        if held.kind == "w" and held.path not in used and not role_of(held.path):
            yield from _paths(held, layouts_of(held, "o", config))


def reordered(parameters: ParameterMap) -> Iterator[ParameterMap]:
    """Yield the map with the stacked projections in each other order."""
    stacked = next((key[2:] for key in parameters if key[2:] in STACKED), "")
    for order in STACKED:
        if order != stacked and sorted(order) == sorted(stacked):
            names = [key.replace(f"_{stacked}", f"_{order}") for key in parameters]
            yield dict(zip(names, parameters.values(), strict=True))


def interleaved(parameters: ParameterMap) -> Iterator[ParameterMap]:
    """Yield the map with the columns of all heads interleaved, in any order of stacked projections.

    They are rows of what makes the heads, columns of W_o, or both. Such a module computes the same
    with other weights.
    """
    for each in (parameters, *reordered(parameters)):
        columns = _interleaved_columns(each)
        if columns:
            yield each | columns
        for rows in _interleaved_rows(each):
            yield each | rows
            if columns:
                yield each | rows | columns


def alike_with_one_head(maps: Iterable[ParameterMap]) -> list[ParameterMap]:
    """Return the first of those maps that differ only in where the axis of heads is."""
    first: dict[str, ParameterMap] = {}
    for each in maps:
        layouts = {key: _without_heads(path) for key, path in each.items()}
        first.setdefault(str(layouts), each)
    return list(first.values())


def _without_heads(path: ParameterPath) -> tuple[str | None, str]:
    """Return the name in a path, and its layout of one head; "" where that is the contract's."""
    if path is None or isinstance(path, str):
        return path, ""
    name, pattern = path
    before, _, after = re.sub(r"\bh ?| h\b", "", pattern).partition(" -> ")
    if before == after:
        return name, ""
    return name, after


def _interleaved_columns(parameters: ParameterMap) -> ParameterMap:
    """Return W_o with interleaved columns, if it has no other layout already."""
    output = parameters.get("w_o")
    return {"w_o": (output, "d (h e) -> d (e h)")} if isinstance(output, str) else {}


def _interleaved_rows(parameters: ParameterMap) -> Iterator[ParameterMap]:
    """Yield what makes the heads with interleaved rows, if none has another layout already."""
    inputs = {}
    for key, path in parameters.items():
        if not INPUTS.keys().isdisjoint(key[2:]):
            if not isinstance(path, str):
                return
            inputs[key] = path
    orders: tuple[str, ...] = ("",)
    if any(key[2:] in STACKED for key in inputs):
        orders = INTERLEAVED_ORDERS
    for order in orders:
        yield {key: (path, _rows_as(order, key)) for key, path in inputs.items()}


def _rows_as(order: str, key: str) -> str:
    """Return the layout of a weight or bias with interleaved rows.

    order: of `INTERLEAVED_ORDERS`, for those that are stacked.
    """
    inputs = " d" if key.startswith("w_") else ""
    if key[2:] in STACKED:
        return f"(r h e){inputs} -> {order}{inputs}"
    return f"(h e){inputs} -> (e h){inputs}"


def order_against_name(parameters: ParameterMap) -> str:
    """Return the name of stacked projections that says another order than the map, or ""."""
    for key, path in parameters.items():
        order, name = key[2:], _name_of(path)
        if order in STACKED and not says_no_order(name):
            said = role_of(name)
            if said in STACKED and said != order:
                return name
    return ""


def not_loaded(module: nn.Module, parameters: Mapping[str, ParameterPath]) -> list[str]:
    """Return the names of the parameters that a map does not fill."""
    filled = []
    for path in parameters.values():
        if path is not None:
            filled.append(re.escape(_name_of(path)).replace(r"\*", "[^.]+"))
    loaded = re.compile(rf"({'|'.join(filled)})(\.\d+)?(\.weight|\.bias)?")
    return [name for name, _ in module.named_parameters() if not loaded.fullmatch(name)]


def _name_of(path: ParameterPath) -> str:
    if path is None:
        return "none"
    return path if isinstance(path, str) else path[0]


def _in_order(module: nn.Module) -> Paths:
    """Return the paths of query, key, value and output, if a list of three or four has them."""
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) in (3, 4) and all(map(is_linear, child)):
            roles = "qkvo"[: len(child)]
            return {f"w_{role}": [f"{name}.{index}"] for index, role in enumerate(roles)}
    return {}
