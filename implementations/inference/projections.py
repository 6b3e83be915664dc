"""Where a module has the four projections: read from the names and shapes of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import permutations, product

from torch import nn

from mha.implementations.adapters.loading import Place
from mha.spec import Config

Map = dict[str, Place]
# Each role's words, as they stand between the underscores, digits and dots of a name.
ROLE_WORDS = {
    "qkv": ("qkv", "wqkv", "cattn", "inproj", "querykeyvalue", "toqkv"),
    "kv": ("kv", "wkv", "tokv", "keyvalue"),
    "q": ("q", "qs", "wq", "query", "queries", "toq", "toqueries"),
    "k": ("k", "ks", "wk", "key", "keys", "tok", "tokeys"),
    "v": ("v", "vs", "wv", "value", "values", "tov", "tovalues"),
    "o": ("o", "wo", "out", "output", "toout", "proj", "dense", "cproj", "fcout", "outproj", "concat", "unifyheads"),
}
# What has one of these in its name is no projection, whatever else the name says.
FOREIGN = ("norm", "ln", "gate", "rel", "relative", "pos", "position", "rotary", "rope", "lora", "embed", "embedding")
NOISE = ("w", "fc", "to", "c", "proj", "linear", "lin", "weight", "layer", "projection", "in", "b", "bias", "attn")


class Unclear(Exception):
    """What could not be inferred, and what to declare instead."""


def role_of(name: str) -> str | None:
    """Return the role that a dotted name tells: "q", "k", "v", "o", "qkv", "kv", or None."""
    if any(word in FOREIGN for part in name.split(".") for word in _words(part)):
        return None
    return _role_of(name.rpartition(".")[2]) or _role_of(name)


def _role_of(name: str) -> str | None:
    words = [word for part in name.split(".") for word in _words(part)]
    joined = "".join(word for word in words if word not in ("weight", "bias"))
    for candidates in ([word for word in words if word not in NOISE], [joined], words):
        roles = [role for role, known in ROLE_WORDS.items() if any(word in known for word in candidates)]
        if len(roles) == 1:
            return roles[0]
    return None


def _words(part: str) -> list[str]:
    """Split a name at underscores and at capitals: W_query, toQKV, cAttn."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part.replace("_", " "))]


def places(module: nn.Module, config: Config) -> dict[str, list[Place]]:
    """Return for each key of a map ("w_q", "w_qkv", "b_o", ...) the ways in which what is there may lie there.

    Raises Unclear where the names tell no role, or one twice.
    """
    found: dict[str, list[Place]] = {}
    for path, shape, kind, layer in _held(module):
        role = role_of(path)
        if role is None:
            continue
        key = f"{kind}_{role}"
        ways = list(_ways(path, shape, role, kind, layer, config))
        if not ways:
            raise Unclear(f"{path} has the shape {shape}, which is none of a projection {key} of {config}")
        if key in found:
            raise Unclear(f"{path} and {_path(found[key][0])} both look like {key}")
        found[key] = ways
    return found or _four_in_order(module)


def maps(module: nn.Module, config: Config) -> list[Map]:
    """Return every map of the projections that names and shapes allow; more than one differ in how weights lie.

    Raises Unclear where a projection of query, key or value is not found.
    """
    found = places(module, config)
    there = {role for key in found if key.startswith("w_") for role in key[2:]}
    missing = sorted({"q", "k", "v"} - there)
    if missing:
        names = ", ".join(name for name, _ in module.named_parameters()) or "nothing"
        raise Unclear(f"no parameter looks like the projection of {', '.join(missing)} (it has {names})")
    if "o" not in there:
        # A layer of the right shape may be it by another name: the trial decides.
        unread = [path for path, shape, kind, _ in _held(module) if _square(shape, kind, config) and not role_of(path)]
        found["w_o"] = [*unread, None]
    return [dict(zip(found, chosen, strict=True)) for chosen in product(*found.values())]


def unloaded(module: nn.Module, places: Mapping[str, Place]) -> list[str]:
    """Return the names of the parameters that a map does not fill: they stay as they are initialised."""
    filled = [re.escape(_path(place)).replace(r"\*", "[^.]+") for place in places.values() if place is not None]
    read = re.compile(rf"({'|'.join(filled)})(\.\d+)?(\.weight|\.bias)?")
    return [name for name, _ in module.named_parameters() if not read.fullmatch(name)]


def _square(shape: tuple[int, ...], kind: str, config: Config) -> bool:
    return kind == "w" and shape == (config.d_model, config.d_model)


def _path(place: Place) -> str:
    return place if isinstance(place, str) else place[0] if place else "nothing"


def _held(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """Yield name, shape, kind and whether it is a linear layer of all that holds weights; heads of a list as one."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    heads = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and len(child)]
    told = set()
    for name, layer in layers.items():
        own = next((each for each in heads if name.startswith(f"{each}.")), None)
        _, _, after = name.removeprefix(f"{own}.").partition(".") if own else ("", "", "")
        shown = f"{own}.*.{after}" if after else own if own and role_of(own) else name
        if shown in told:
            continue
        told.add(shown)
        count = sum(each.startswith(f"{own}.") and each.endswith(after) for each in layers) if shown != name else 1
        yield shown, (layer.out_features * count, layer.in_features), "w", True
    for name, parameter in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner in layers or "norm" in type(module.get_submodule(owner)).__name__.lower():
            continue
        named = any(word in ("b", "bias", "biases") for word in _words(last))
        if named or parameter.ndim > 1:
            yield name, tuple(parameter.shape), "b" if named else "w", False


def _ways(path: str, shape: tuple[int, ...], role: str, kind: str, layer: bool, config: Config) -> Iterator[Place]:
    """Yield how a weight or bias of the contract may lie in this shape, the usual way first."""
    d, h, e, r = config.d_model, config.n_heads, config.head_dim, len(role)
    columns = "(r h e)" if r > 1 else "(h e)"
    patterns: list[str] = []
    if kind == "b":
        shapes = {(r * d,): [""], (r, h, e): [f"{columns} -> r h e"], (h, e): [f"{columns} -> h e"]}
        patterns = shapes.get(shape, [])
    elif shape in ((r * d, d), (d, r * d)):
        ways = ("", "(h r e)", "(h e r)") if r > 1 else ("",)
        if shape == (r * d, d):
            patterns += [f"(r h e) d -> {way} d" if way else "" for way in ways]
        if shape == (d, r * d) and not layer:  # which may be multiplied from either side
            patterns += [f"(r h e) d -> d {way or '(r h e)'}" if r > 1 else "o i -> i o" for way in ways]
    elif role == "o":
        patterns = [f"d (h e) -> {' '.join(way)}" for way in permutations("hed") if _fits(shape, way, config)]
    else:
        patterns = [f"(h e) d -> {' '.join(way)}" for way in permutations("hed") if _fits(shape, way, config)]
    yield from ((path, pattern) if pattern else path for pattern in patterns)


def _fits(shape: tuple[int, ...], axes: tuple[str, ...], config: Config) -> bool:
    sizes = {"d": config.d_model, "h": config.n_heads, "e": config.head_dim}
    return shape == tuple(sizes[axis] for axis in axes)


def _four_in_order(module: nn.Module) -> dict[str, list[Place]]:
    """Four layers in one list, named by nothing but their place: query, key, value, output."""
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == 4 and all(isinstance(x, nn.Linear) for x in child):
            return {f"w_{role}": [f"{name}.{place}"] for place, role in enumerate("qkvo")}
    return {}
