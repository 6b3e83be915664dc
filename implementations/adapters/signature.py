"""What the parameters of a function mean, by their names: the inputs, the masks and the flags of an
attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MethodType
from typing import Any

from mha.implementations.adapters.names import (
    FLAGS,
    INPUT_NAMES,
    MEMORY_NAMES,
    MEMORY_WORDS,
    NEUTRAL_MEANING,
    NUMBERS,
    OPTION_NAMES,
    OTHER_MASKS,
    PADDING_NAMES,
    PAIRED,
    QUERY_WORDS,
    WINDOW_NAMES,
    WINDOW_PAIRS,
    is_causal_flag,
    is_option,
    words_of,
)

# Options that are numbers, and no flags.
OF_NUMBERS = ("softcap", "sinks", "alibi")


@dataclass(frozen=True)
class Signature:
    """The parameters of a function by what they mean.

    inputs: its names for query, key and value; empty if they are passed by position.
    one_input: whether it can be called with a single input, as self-attention is.
    memory: its name for one input that is both key and value; the query then comes first.
    query: its name for the query, if the memory comes first.
    mask, padding, is_causal, need_weights, average, scale, return_lse, softcap, sinks, alibi: its
        names for these options; None for one that it does not have.
    window: those for a window, one or two; empty if it has none.
    required: those of its options, and its memory, that have no default. none_by_default: those
        whose default is None.
    others: the other parameters that have no default: those of `NEUTRAL_NAMES`, and others, which
        are given None.
    rotations: those of them that are given cosines of 1 and sines of 0. pairs: whether these, or
        `PAIRED`, are for each position and pair of columns.
    alone: what they mean in self-attention, where a memory is left out; None if it is always
        passed.
    """

    inputs: tuple[str, ...]
    one_input: bool
    memory: str | None
    mask: str | None
    padding: str | None
    is_causal: str | None
    need_weights: str | None
    average: str | None
    scale: str | None
    return_lse: str | None
    softcap: str | None
    sinks: str | None
    alibi: str | None
    window: tuple[str, ...]
    required: frozenset[str]
    none_by_default: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    rotations: frozenset[str] = frozenset()
    pairs: bool = False
    query: str | None = None
    alone: Signature | None = None

    @property
    def has_optional_memory(self) -> bool:
        """Whether it takes a memory, and can be called without one."""
        return self.memory is not None and self.one_input

    def with_rotations(self, *, of_pairs: bool) -> Signature:
        """Return the same, with rotations for each position and pair of columns, or as they are."""
        if not of_pairs:
            return self
        given = self.rotations.union(name for name in self.others if name in PAIRED)
        return replace(
            self,
            rotations=given,
            pairs=True,
            alone=self.alone and self.alone.with_rotations(of_pairs=True),
        )

    @property
    def guesses_mask(self) -> bool:
        """Whether the name of its mask is not known, so that it may be something else."""
        return self.mask is not None and self.mask not in OPTION_NAMES["mask"]


def signature_of(
    parameters: Mapping[str, inspect.Parameter],
    *,
    padding: bool = False,
    self_attention: bool = False,
    query_last: bool | None = None,
) -> Signature:
    """Return what the parameters of a function mean, by their names.

    padding: whether one mask is of key padding. self_attention: whether a memory is never passed.
    query_last: of two inputs, whether the first one is a memory, or the second one; None if their
    names say it.
    """
    inputs = input_names(parameters)
    memory, query = _memory_and_query(parameters, query_last)
    one_input, others = _one_input_and_others(parameters, inputs, memory)
    mask, of_padding = _mask_names(
        parameters, padding, has_memory=memory is not None and not self_attention
    )
    is_causal, need_weights, average = (
        option_name(name, parameters) for name in ("is_causal", "need_weights", "average")
    )
    given = (mask, of_padding, is_causal, need_weights, average)
    others += [name for name in _required_options(parameters) if name not in given]
    return Signature(
        inputs=inputs,
        one_input=one_input,
        memory=memory,
        mask=mask,
        padding=of_padding,
        is_causal=is_causal,
        need_weights=need_weights,
        average=average,
        scale=option_name("scale", parameters),
        return_lse=option_name("return_lse", parameters),
        softcap=option_name("softcap", parameters),
        sinks=option_name("sinks", parameters),
        alibi=option_name("alibi", parameters),
        window=window_names(parameters),
        required=_with_default(parameters, inspect.Parameter.empty),
        none_by_default=_with_default(parameters, None),
        others=tuple(name for name in others if name != query),
        rotations=frozenset(name for name in others if _is_rotation(parameters[name])),
        query=query,
    )


def _memory_and_query(
    parameters: Mapping[str, inspect.Parameter], query_last: bool | None
) -> tuple[str | None, str | None]:
    """Return a function's names for a memory, if it takes one, and for the query, if that is not
    passed first.
    """
    if query_last is None or not takes_two(parameters):
        return None if input_names(parameters) else memory_name(parameters), None
    first, second = (parameter.name for parameter in required_inputs(parameters))
    return (first, second) if query_last else (second, None)


def _mask_names(
    parameters: Mapping[str, inspect.Parameter], padding: bool, *, has_memory: bool
) -> tuple[str | None, str | None]:
    """Return a function's names for its mask, and for one of padding beside it.

    A name that is not known, but has the word mask, is of the mask of a memory if it says so, as in
    BERT; of the only mask; or of one of pairs beside one of padding.
    """
    unknown = [name for name, parameter in parameters.items() if _is_unknown_mask(parameter)]
    if of_memory := _masks_of_memory(unknown, parameters) if has_memory else []:
        return of_memory[0], None
    named = [name for name in parameters if not isinstance(parameters[name].default, bool)]
    of_padding = next(filter(named.__contains__, PADDING_NAMES), None) if padding else None
    known = [name for name in OPTION_NAMES["mask"] if name in named and name != of_padding]
    return next(chain(known, unknown), None), of_padding


def _masks_of_memory(masks: list[str], parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the masks whose names say that they are of the memory, and of no other one that can be
    passed.
    """
    memory = memory_name(parameters) or ""
    other_memories = parameters.keys() & {*MEMORY_NAMES} - {memory}
    other_words = {word for other in other_memories for word in words_of(other)}.difference(
        words_of(memory)
    )
    return [name for name in masks if not MEMORY_WORDS.isdisjoint({*words_of(name)} - other_words)]


def _is_unknown_mask(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is called a mask, and may be a tensor."""
    name, annotation = parameter.name, _annotation(parameter)
    is_unknown = "mask" in words_of(name) and name not in (*OTHER_MASKS, *OPTION_NAMES["mask"])
    has_value = parameter.default is not None and parameter.default is not parameter.empty
    return is_unknown and not has_value and not annotation.startswith(NUMBERS)


def _annotation(parameter: inspect.Parameter) -> str:
    return inspect.formatannotation(parameter.annotation).strip("'")


def input_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return a function's names for query, key and value; empty unless it names all three."""
    names = [
        next((name for name in known if name in parameters), "") for known in INPUT_NAMES.values()
    ]
    positional = any(
        name and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in names
    )
    return tuple(names) if all(names) and not positional else ()


def option_name(option: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return a function's name for an option of `OPTION_NAMES`; None if it does not have it.

    >>> option_name("is_causal", inspect.signature(lambda x, causal_mask=False: x).parameters)
    'causal_mask'
    """
    known = (
        _numbers(OPTION_NAMES[option], parameters) if option in OF_NUMBERS else OPTION_NAMES[option]
    )
    present = [name for name in known if name in parameters]
    named = next(
        (name for name in present if name not in FLAGS or _is_flag(parameters[name])), None
    )
    if named or option != "is_causal":
        return named
    return next((name for name, p in parameters.items() if is_causal_flag(name, p.default)), None)


def window_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return a function's names for a window: two for two numbers, or one; empty if it has none.

    >>> window_names(inspect.signature(lambda q, k, v, window_left=-1: q).parameters)
    ('window_left',)
    """
    pair = next((pair for pair in WINDOW_PAIRS if all(name in parameters for name in pair)), None)
    return pair or tuple(_numbers(WINDOW_NAMES, parameters))[:1]


def _numbers(known: Iterable[str], parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield the names of a function that are no flags; a flag of such a name switches something on."""
    for name in known:
        if name in parameters and not _is_flag(parameters[name]):
            yield name


def _with_default(parameters: Mapping[str, inspect.Parameter], value: object) -> frozenset[str]:
    """Return the names of a function's parameters whose default is a value."""
    return frozenset(name for name, parameter in parameters.items() if parameter.default is value)


def _is_flag(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")


def memory_name(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return a function's name for one input that is both key and value; None unless another input
    comes first.

    Three required inputs are query, key and value, whatever their names.
    """
    if len(required_inputs(parameters)) == 3:
        return None
    name = next((name for name in MEMORY_NAMES if name in parameters), None)
    first = next(iter(required_inputs(parameters)), None)
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    query_first = first is not None and first.kind in by_position and first.name != name
    return (
        name
        if name is not None and query_first and parameters[name].kind is not by_position[0]
        else None
    )


def takes_two(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function requires two inputs, by any names, one of which may be a memory."""
    return len(required_inputs(parameters)) == 2 and not input_names(parameters)


def possible_orders(parameters: Mapping[str, inspect.Parameter]) -> list[bool]:
    """Return what `query_last` may be for two inputs whose names do not say which one is the
    memory.

    >>> possible_orders(inspect.signature(lambda x, z: x).parameters)
    [False, True]
    >>> possible_orders(inspect.signature(lambda src, tgt: src).parameters)
    [True]
    """
    if not takes_two(parameters):
        return []
    first, second = ({*words_of(parameter.name)} for parameter in required_inputs(parameters))
    query_first = not (memory_name(parameters) or first & MEMORY_WORDS or second & QUERY_WORDS)
    query_last = not (second & MEMORY_WORDS or first & QUERY_WORDS)
    return [last for last, fits in ((False, query_first), (True, query_last)) if fits]


def _required_options(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the options without a default."""
    return [name for name, p in parameters.items() if is_option(name) and p.default is p.empty]


def numbers_of_heads(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return the parameters that are a number of heads, by their name, with that of one model as
    default.
    """
    counts = [name for name, p in parameters.items() if type(p.default) is int and p.default > 0]
    return tuple(name for name in counts if NEUTRAL_MEANING.get(name) == "n_heads")


def call_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; a pair that it takes apart into cosines and sines has no
    default.

    >>> def forward(x, position_embeddings=None):
    ...     cos, sin = position_embeddings
    >>> call_parameters(forward)["position_embeddings"]
    <Parameter "position_embeddings: tuple">

    Raises ValueError for a function whose signature cannot be read.
    """
    parameters = dict(inspect.signature(function).parameters)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code and {"cos", "sin"} <= {*code.co_varnames, *code.co_cellvars}:
        pairs = [p for name, p in parameters.items() if NEUTRAL_MEANING.get(name) == "rotation"]
        parameters |= {p.name: p.replace(default=p.empty, annotation=tuple) for p in pairs}
    return parameters


def forward_of(cls: type) -> Callable[..., Any]:
    """Return `forward` of a class, with the parameters that a call passes: without the receiver,
    whatever its name.

    >>> class Attention:
    ...     def forward(this, x): ...
    >>> list(call_parameters(forward_of(Attention)))
    ['x']
    """
    found: Any = cls.forward  # type: ignore[attr-defined]  # its callers ask for modules
    is_bound, own = (
        getattr(found, "__self__", None) is not None,
        inspect.getattr_static(cls, "forward", found),
    )
    # What has no `__get__` is called without a receiver.
    if is_bound or isinstance(own, staticmethod) or not hasattr(type(own), "__get__"):
        return found  # type: ignore[no-any-return]  # a function
    return MethodType(found, object())


def _is_rotation(parameter: inspect.Parameter) -> bool:
    """Return whether a required parameter is of a rotation, and cannot be None."""
    meaning, annotation = NEUTRAL_MEANING.get(parameter.name), _annotation(parameter)
    if (
        meaning not in ("cosines", "sines", "rotation")
        or "None" in annotation
        or "Optional" in annotation
    ):
        return False
    return (
        "tuple" in annotation.lower()
        if meaning == "rotation"
        else not annotation.startswith(NUMBERS)
    )


def required_inputs(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters without a default that may be inputs: the first one, and others of no
    other meaning.
    """
    required = _required(parameters)
    return required[:1] + [p for p in required[1:] if p.name not in NEUTRAL_MEANING]


def _possible_inputs(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters that are not `**kwargs` or an option, nor `*args` beside other inputs.

    In `forward(query, *rest)`, the rest is key and value.
    """
    own = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD and not is_option(p.name)]
    if own and own[0].name in INPUT_NAMES["query"] and not input_names(parameters):
        return own
    return own[:1] + [p for p in own[1:] if p.kind is not p.VAR_POSITIONAL]


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters without a default that are not `**kwargs` or an option.

    Where none of them can be an input, the first parameter is one, if its default is None.

    >>> _required(inspect.signature(lambda hidden_states=None, mask=None: hidden_states).parameters)
    [<Parameter "hidden_states=None">]
    """
    own = _possible_inputs(parameters)
    required = [p for p in own if p.default is p.empty]
    has_input = any(p.name not in NEUTRAL_MEANING for p in required)
    return required if has_input else [p for p in own[:1] if p.default is None] + required


def _one_input_and_others(
    parameters: Mapping[str, inspect.Parameter], inputs: tuple[str, ...], memory: str | None
) -> tuple[bool, list[str]]:
    """Return whether a function can be called with one input, and what it requires beside its
    inputs.

    Three required parameters without known names are query, key and value.
    """
    required = [p for p in _required(parameters) if p.name not in (*inputs, memory)]
    if inputs:
        return False, [p.name for p in required]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in required)
    neutral = [p.name for p in required[1:] if p.name in NEUTRAL_MEANING]
    if variadic or len(required) - len(neutral) in (0, 3):
        return False, neutral
    return _takes_one(parameters, required[0], memory), [p.name for p in required[1:]]


def _takes_one(
    parameters: Mapping[str, inspect.Parameter], first: inspect.Parameter, memory: str | None
) -> bool:
    """Return whether the first parameter is passed by position, and a memory beside it can be left
    out.
    """
    needs_memory = memory is not None and parameters[memory].default is inspect.Parameter.empty
    return first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) and not needs_memory
