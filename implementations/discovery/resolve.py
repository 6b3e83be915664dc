"""Finding implementations: by a registered name, or by module or file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

from mha.implementations.adapters.construction import Room
from mha.implementations.adapters.constructor_names import without_partial
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.adapters.pickled import pickled
from mha.implementations.discovery.errors import (
    ImplementationError,
    UnavailableError,
)
from mha.implementations.discovery.importing import (
    classes_of,
    contained,
    default_warnings,
    described,
    entry_point_of,
    judge_left_alone,
    load_file,
    load_module,
    member_of,
)
from mha.implementations.discovery.inferred import inference_of
from mha.implementations.discovery.loaded import attribute, module_named
from mha.implementations.inference.biases import most_biases
from mha.implementations.inference.infer import Inference
from mha.implementations.process.pristine import as_found, pristine
from mha.spec import Attention, Claims, Config, Implementation, Sharded, Weights

# The group of entry points under which packages register implementations.
GROUP = "mha.implementations"


@dataclass(frozen=True, eq=False)
class Renamed:
    """An implementation under the name that it is registered under, or that a target gives it."""

    implementation: Implementation
    name: str

    @property
    def claims(self) -> Claims:
        """The claims of the implementation."""
        return self.implementation.claims

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        """Build the implementation; see `mha.spec.Implementation`."""
        return self.implementation.build(config, weights, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class Resolved:
    """An implementation, and how it was named.

    implementation: under the registered name, or that of the target, if there is one.
    target: what `resolve` was given, and takes again; of what "all" names, the registered name.
    inference: how a plain class was understood; None for a declared implementation.

    >>> resolved = resolve("sdpa")[0]
    >>> resolved.implementation.name, resolved.target
    ('sdpa', 'sdpa')
    """

    implementation: Implementation
    target: str
    inference: Inference | None = None


@dataclass(frozen=True)
class Registered:
    """A registered implementation, or why it is unavailable.

    name, target: of the entry point.
    implementation: None if it could not be loaded; error: why not.
    broken: whether that is a failure, rather than something optional that is missing.
    inference: as of `Resolved`.

    >>> [entry.target for entry in discover() if entry.name == "sdpa"]
    ['mha.implementations.sdpa:implementation']
    """

    name: str
    target: str
    implementation: Implementation | None = None
    error: str = ""
    broken: bool = False
    inference: Inference | None = None

    @property
    def note(self) -> str:
        """Why it cannot be used, in a line."""
        state = "cannot be loaded" if self.broken else "is not available"
        return f"{self.name} ({self.target}) {state}: {self.error}"

    @property
    def is_built_in(self) -> bool:
        """Whether this package ships it."""
        return self.target.startswith("mha.implementations.")


def discover(started: Callable[[str], object] = str) -> list[Registered]:
    """Load every registered implementation, in the order of their names.

    Raises nothing: an implementation that fails to load is returned with its error.

    started: called with each name before it is loaded.

    >>> {entry.name: entry.target for entry in discover()}["loop"]
    'mha.implementations.loop:implementation'
    """
    points, loaded = list(entry_points(group=GROUP)), []
    for name in sorted({point.name for point in points}):
        started(name)
        loaded.append(_load_named(name, points))
    return loaded


@dataclass(frozen=True)
class Found:
    """What some targets name.

    unavailable: the registered implementations that "all" names, and that cannot be used.
    """

    resolved: list[Resolved]
    unavailable: tuple[Registered, ...] = ()

    @property
    def broken(self) -> dict[str, str]:
        """Why those that fail to load cannot be used, by name, as in a report."""
        return {each.name: each.error for each in self.unavailable if each.broken}

    @property
    def notes(self) -> list[str]:
        """A line for each that cannot be used."""
        return [entry.note for entry in self.unavailable]


def find(targets: Iterable[str], started: Callable[[str], object] = str) -> Found:
    """Return what targets name, and what "all" would name if it could be used.

    started: called with each target, and with each name of "all", before it is loaded.

    Raises ImplementationError as `resolve`.

    >>> find(["all"]).broken
    {}
    """
    resolved: list[Resolved] = []
    unavailable: list[Registered] = []
    for target in targets:
        if target == "all":
            entries = discover(started)
            resolved += available(entries)
            unavailable += [entry for entry in entries if entry.implementation is None]
        else:
            started(target)
            resolved += resolve(target)
    return Found(resolved, tuple({entry.name: entry for entry in unavailable}.values()))


def available(entries: Iterable[Registered]) -> list[Resolved]:
    """Return the registered implementations that were loaded."""
    found = []
    for entry in entries:
        if entry.implementation is not None:
            found.append(Resolved(entry.implementation, entry.name, entry.inference))
    return found


def resolve(target: str) -> list[Resolved]:
    """Return the implementations that `target` names: one, except for "all".

    target: a registered name, "package.module:object", "path/to/file.py:object", one of these under
        another name, "NAME=target", or "all" for every registered implementation that loads (`find`
        says which do not). The object is an implementation, or one is inferred from it: a
        `torch.nn.Module` class, a function that makes a module, a function of query, key and value,
        or a `functools.partial` of one.

    Raises ImplementationError if there is no such object, or it cannot be loaded or judged.

    >>> (resolved,) = resolve("mha.implementations.minimal:MinimalAttention")
    >>> resolved.implementation.name
    'MinimalAttention'
    >>> print(resolved.inference.declaration)
    from mha.implementations import from_module
    from mha.spec import Claims
    <BLANKLINE>
    implementation = from_module(
        MinimalAttention,
        parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"},
        claims=Claims(returns_weights=False, dtypes={"bfloat16", "float16", "float32", "float64"}),
    )
    """
    if target == "all":
        return available(discover())
    name, plain = split_name(target)
    if name:
        if plain == "all":
            raise ImplementationError(
                f"{target!r} gives one name to all implementations; name one of them"
            )
        (found,) = resolve(plain)
        return [replace(found, implementation=_named(found.implementation, name), target=target)]
    if ":" in target:
        place, _, attribute = target.rpartition(":")
        module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
        implementation, inference = _implementation(target, member_of(module, attribute, target))
        return [Resolved(implementation, target, inference)]
    if target.endswith(".py"):
        classes = ", ".join(classes_of(load_file(Path(target)))) or "none"
        raise ImplementationError(
            f"{target!r} is a file; name a class in it, as {target}:NAME (its classes: {classes})"
        )
    entry = _load_entry(entry_point_of(target, list(entry_points(group=GROUP))))
    if entry.implementation is None:
        kind = ImplementationError if entry.broken else UnavailableError
        raise kind(f"the implementation {target!r} ({entry.target}) cannot be used: {entry.error}")
    return [Resolved(entry.implementation, target, entry.inference)]


def as_resolved(value: object) -> Resolved:
    """Return what a value stands for: a target, or an object that a target may name.

    Raises ImplementationError for a target that cannot be resolved or names several, and for any
    other value.

    >>> as_resolved(torch.nn.Linear)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    mha.implementations.discovery.errors.ImplementationError: Linear: none of the parameters ...
    """
    if isinstance(value, Resolved):
        return value
    if isinstance(value, str):
        resolved = resolve(value)
        if len(resolved) != 1:
            raise ImplementationError(
                f"{value!r} names {len(resolved)} implementations; name one of them"
            )
        return resolved[0]
    named = without_partial(value)
    module = getattr(value, "__module__", "")
    name = getattr(named, "__name__", type(value).__name__)
    has_a_place = attribute(module_named(module), name) is value and module != "__main__"
    implementation, inference = _implementation(name, value)
    return Resolved(implementation, f"{module}:{name}" if has_a_place else "", inference)


def split_name(target: str) -> tuple[str, str]:
    """Return the name that a target gives, empty if it gives none, and the target without it.

    >>> split_name("old=attention.py:MyAttention"), split_name("sdpa")
    (('old', 'attention.py:MyAttention'), ('', 'sdpa'))
    """
    name, given, plain = target.partition("=")
    if not given or not re.fullmatch(r"[\w.-]+", name):
        return "", target
    file, _, _ = target.rpartition(":")
    if Path(file or target).exists():  # a path may have a "="
        return "", target
    return name, plain


def preflight(implementation: Implementation) -> None:
    """Build a small attention, to find an adapter that does not fit its module before judging.

    Raises ImplementationError for an object that is not an implementation, and what the adapter
    raises of this type. Any other error in `build` is ignored: the clauses about construction
    report it.

    >>> preflight(resolve("loop")[0].implementation)
    >>> preflight("loop")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    mha.implementations.discovery.errors.ImplementationError: 'loop' is not an implementation: ...
    """
    name, claims = getattr(implementation, "name", None), getattr(implementation, "claims", None)
    builds = callable(getattr(implementation, "build", None))
    if not (isinstance(name, str) and isinstance(claims, Claims) and builds):
        raise ImplementationError(
            f"{implementation!r:.80} is not an implementation: it needs a name (str), claims"
            f" (mha.spec.Claims) and a method build, but its name is {name!r:.80} and its claims"
            f" are {claims!r:.80}"
        )
    if claims.world_sizes and not isinstance(original_of(implementation), Sharded):
        raise ImplementationError(
            f"{name} claims ranks (Claims.world_sizes), but has no build_rank, placements, order"
            " and unsharded, as a mha.spec.Sharded has; make one with"
            " mha.implementations.from_sharded"
        )
    if claims.world_sizes:
        pickled(original_of(implementation))
    n_heads, head_dim = min(claims.sizes.n_heads or {2}), claims.sizes.fit_head_dim(2)
    key_heads = 1 if claims.multi_query else None
    bias = most_biases(claims.bias)
    width, norm_weights = n_heads * head_dim, claims.norm_weights
    config = Config(width, n_heads, key_heads, bias=bias, norm_weights=norm_weights)
    weights = Weights.random(config, 0, torch.float32)
    try:
        with pristine(), as_found():  # what it changes is changed again when it is judged
            implementation.build(config, weights, dtype=torch.float32, device="cpu")
    except (Exception, SystemExit) as error:
        if isinstance(error, ImplementationError):
            raise


def _load_named(name: str, points: Sequence[EntryPoint]) -> Registered:
    try:
        return _load_entry(entry_point_of(name, points))
    except ImplementationError as error:  # the name is registered twice
        return Registered(name, name, error=str(error), broken=True)


def _load_entry(point: EntryPoint) -> Registered:
    shown = f"the registered implementation {point.name} ({point.value})"
    try:
        with judge_left_alone(), default_warnings(), contained(shown):
            implementation, inference = _implementation(point.value, point.load())
        return Registered(
            point.name, point.value, _named(implementation, point.name), inference=inference
        )
    except UnavailableError as error:
        return Registered(point.name, point.value, error=str(error))
    except ImplementationError as error:
        return Registered(point.name, point.value, error=str(error), broken=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything while it is imported
        return Registered(point.name, point.value, error=described(error), broken=True)


def _named(implementation: Implementation, name: str) -> Implementation:
    if implementation.name == name:
        return implementation
    return Renamed(implementation, name)


def original_of(implementation: Implementation) -> Implementation:
    """Return an implementation under its own name."""
    if isinstance(implementation, Renamed):
        return implementation.implementation
    return implementation


def with_room(implementation: Implementation, room: Room) -> Implementation:
    """Return an implementation that builds modules for inputs of some length and batch."""
    if isinstance(implementation, Renamed):
        inner = with_room(implementation.implementation, room)
        return replace(implementation, implementation=inner)
    if isinstance(implementation, ModuleImplementation):
        return replace(implementation, room=room)
    return implementation


def _implementation(target: str, value: object) -> tuple[Implementation, Inference | None]:
    """Return a declared implementation as it is, and what is inferred of a plain class."""
    with judge_left_alone():
        declared = _declared(target, value)
        if declared is not None:
            return declared, None
        inferred = inference_of(target, value)
        return inferred.implementation, inferred


def _declared(target: str, value: object) -> Implementation | None:
    """Return a value that is an implementation, once it is known to be sound; None for another."""
    try:
        if isinstance(value, type) or not isinstance(value, Implementation):
            return None
        preflight(value)
        return value
    except (ImplementationError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of its name or claims, which may be properties
        raise ImplementationError(f"{target!r} cannot be used: {described(error)}") from error
