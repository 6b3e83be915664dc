"""What the parameters of a function mean, by their names: inputs, masks and flags."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mha.implementations.adapters.named_options import (
    annotation_of,
    first_known,
    is_unknown_mask,
    option_name,
    optional_memory,
)
from mha.implementations.adapters.names import (
    INPUT_NAMES,
    LENGTH_NAMES,
    MEMORY_NAMES,
    MEMORY_WORDS,
    NEUTRAL_MEANING,
    NUMBERS,
    OPTION_NAMES,
    PADDING_NAMES,
    PAIRED,
    QUERY_WORDS,
    is_option,
    words_of,
)
from mha.implementations.adapters.score_arguments import Names, acting_names, score_names
from mha.implementations.adapters.tables import tables_in

# Of an input that a call gives alone; one that is keyword-only is given by its name.
GIVEN = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True)
class Signature:
    """The parameters of a function by what they mean.

    inputs: its names for query, key and value; empty if they are passed by position.
    one_input: whether it can be called with a single input, as self-attention is.
    memory: its name for one input that is both key and value; the query then comes first.
    mask, padding, is_causal, need_weights, average, grouped: its names for these options; None for
        one that it does not have.
    scores: those for options about the scores, as of `score_names`.
    required: the names of all parameters without a default.
    none_by_default: the names of all parameters with the default None.
    others: the other parameters that have no default: those of `NEUTRAL_NAMES`, and others, which
        are given None.
    acting: the options about the scores whose default is one of a model, as a cap of 50; every
        call is given what says that there is none, if that is known.
    rotations: those of the others that are given cosines of 1 and sines of 0.
    shaped: whether these, or `PAIRED`, have the shape that `rotation` says, and not one element.
    part: how much of each head these are for, as `Rotary.part`.
    tables: all parameters that say how heads are rotated: cosines, sines, positions.
    rotation: the layout of these, one of `ROTATION_LAYOUTS`.
    query: its name for the query, if the memory comes first, or if it is keyword-only.
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
    scores: Names
    required: frozenset[str]
    none_by_default: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    acting: tuple[str, ...] = ()
    rotations: frozenset[str] = frozenset()
    shaped: bool = False
    part: float = 1.0
    tables: tuple[str, ...] = ()
    rotation: str = "b l r"
    query: str | None = None
    grouped: str | None = None
    alone: Signature | None = None

    @property
    def has_optional_memory(self) -> bool:
        """Whether it takes a memory, and can be called without one."""
        return self.memory is not None and self.one_input

    def with_rotations(self, *, of_pairs: bool, layout: str | None = None) -> Signature:
        """Return the same, with rotations for each position and pair of columns, or as they are.

        layout: of tables that are given; by default of pairs or columns as the other one says.
        """
        alone, rotations = self.alone, self.rotations
        shaped = of_pairs or layout is not None
        if alone is not None:
            alone = alone.with_rotations(of_pairs=of_pairs, layout=layout)
        layout = layout or ("l p" if of_pairs else "b l r")
        if of_pairs:
            rotations = rotations.union(name for name in self.others if name in PAIRED)
        return replace(self, rotations=rotations, shaped=shaped, rotation=layout, alone=alone)

    def with_lengths(self, parameters: Mapping[str, inspect.Parameter]) -> Signature:
        """Return the same, with the number of keys of each item where it may be a mask by its name.

        parameters: of the function, where lengths are claimed.
        """
        name, mask = first_known(LENGTH_NAMES, parameters), self.mask
        if mask in LENGTH_NAMES:
            name, mask = mask, None
        if name is None or "key_lengths" in self.scores:
            return self
        others = self.others
        if name in self.required and name not in others:
            others = (*others, name)
        return replace(
            self, mask=mask, others=others, scores={**self.scores, "key_lengths": (name,)}
        )

    @property
    def lengths(self) -> frozenset[str]:
        """The names of the lengths of the items of a dense batch."""
        found = [*self.scores.get("key_lengths", ()), *self.scores.get("query_lengths", ())]
        return frozenset(found)

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

    padding: whether one mask is of key padding.
    self_attention: whether a memory is never passed.
    query_last: of two inputs, whether the first one is a memory, or the second one; None if their
        names say it.
    """
    inputs = input_names(parameters)
    memory, query = _memory_and_query(parameters, query_last)
    one_input, others = _one_input_and_others(parameters, inputs, memory)
    has_memory = memory is not None and not self_attention
    mask, of_padding = _mask_names(parameters, padding, has_memory=has_memory)
    is_causal = option_name("is_causal", parameters)
    need_weights = option_name("need_weights", parameters)
    average = option_name("average", parameters)
    given = (mask, of_padding, is_causal, need_weights, average)
    others += [name for name in _required_options(parameters) if name not in given]
    rotations = [name for name in others if _is_rotation(parameters[name])]
    return Signature(
        inputs=inputs,
        one_input=one_input,
        memory=memory,
        mask=mask,
        padding=of_padding,
        is_causal=is_causal,
        need_weights=need_weights,
        average=average,
        scores=score_names(parameters),
        required=_with_default(parameters, inspect.Parameter.empty),
        none_by_default=_with_default(parameters, None),
        others=tuple(name for name in others if name != query),
        acting=acting_names(parameters),
        rotations=frozenset(rotations),
        tables=tables_in(tuple(parameters)),
        query=query,
        grouped=option_name("grouped", parameters),
    )


def _memory_and_query(
    parameters: Mapping[str, inspect.Parameter], query_last: bool | None
) -> tuple[str | None, str | None]:
    """Return the names of a memory, if there is one, and of a query that is passed by name."""
    if query_last is not None and takes_two(parameters):
        first, second = _names_of(required_inputs(parameters))
        return (first, second) if query_last else (second, None)
    if input_names(parameters):
        return None, None
    inputs = required_inputs(parameters)
    is_named = bool(inputs) and inputs[0].kind is inspect.Parameter.KEYWORD_ONLY
    return memory_name(parameters), inputs[0].name if is_named else None


def _mask_names(
    parameters: Mapping[str, inspect.Parameter], padding: bool, *, has_memory: bool
) -> tuple[str | None, str | None]:
    """Return a function's names for its mask, and for one of padding beside it.

    A name that is not known, but has the word mask, is of the mask of a memory if it says so, as in
    BERT; of the only mask; or of one of pairs beside one of padding.
    """
    unknown = [name for name, parameter in parameters.items() if is_unknown_mask(parameter)]
    if has_memory:
        of_memory = _masks_of_memory(unknown, parameters)
        if of_memory:
            return of_memory[0], None
    no_tensor = bool | int | float | str
    named = {name: p for name, p in parameters.items() if not isinstance(p.default, no_tensor)}
    of_padding = first_known(PADDING_NAMES, named) if padding else None
    others = [name for name in OPTION_NAMES["mask"] if name != of_padding]
    mask = first_known(others, named)
    if mask is None and unknown:
        mask = unknown[0]
    return mask, of_padding


def _masks_of_memory(masks: list[str], parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the masks whose names say that they are of the memory, and of no other one."""
    memory = memory_name(parameters) or ""
    other_words: set[str] = set()
    for other in MEMORY_NAMES:
        if other in parameters and other != memory:
            other_words.update(words_of(other))
    words_of_memory = MEMORY_WORDS - other_words.difference(words_of(memory))
    return [name for name in masks if not words_of_memory.isdisjoint(words_of(name))]


def input_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return a function's names for query, key and value; empty unless it names all three.

    Beside a cache that is required, keys and values that may be left out are what it appends.

    >>> def attend(q, k_cache, v_cache, k=None, v=None): ...
    >>> input_names(inspect.signature(attend).parameters)
    ()
    """
    names = []
    for known in INPUT_NAMES.values():
        name = first_known(known, parameters)
        if name is None:
            return ()
        names.append(name)
    by_position_only = inspect.Parameter.POSITIONAL_ONLY
    if any(parameters[name].kind is by_position_only for name in names):
        return ()
    are_optional = any(parameters[name].default is None for name in names)
    if are_optional and _requires_cache(parameters):
        return ()
    return tuple(names)


def _requires_cache(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether the second and the third input are required, and called a cache."""
    first_three = [*parameters.values()][:3]
    caches = [each for each in first_three[1:] if "cache" in words_of(each.name)]
    return len(caches) == 2 and all(each.default is each.empty for each in caches)


def _with_default(parameters: Mapping[str, inspect.Parameter], value: object) -> frozenset[str]:
    """Return the names of a function's parameters whose default is a value."""
    return frozenset(name for name, parameter in parameters.items() if parameter.default is value)


def memory_name(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return a function's name for one input that is both key and value, after another input.

    None without one. Three required inputs are query, key and value, whatever their names.
    """
    inputs = required_inputs(parameters)
    name = first_known(MEMORY_NAMES, parameters) or optional_memory(parameters)
    if name is None or not inputs or len(inputs) == 3:
        return None
    first = inputs[0]
    query_first = first.kind in GIVEN and first.name != name
    can_be_named = parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    if query_first and can_be_named:
        return name
    return None


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
    first, second = map(words_of, _names_of(required_inputs(parameters)))
    orders = []
    names_fit = MEMORY_WORDS.isdisjoint(first) and QUERY_WORDS.isdisjoint(second)
    if names_fit and not memory_name(parameters):
        orders.append(False)
    if MEMORY_WORDS.isdisjoint(second) and QUERY_WORDS.isdisjoint(first):
        orders.append(True)
    return orders


def _required_options(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the options without a default."""
    return [name for name, p in parameters.items() if is_option(name) and p.default is p.empty]


def numbers_of_heads(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return the parameters that are a number of heads, by their name, with that of one model as
    default.
    """
    counts = []
    for name, parameter in parameters.items():
        has_number = type(parameter.default) is int and parameter.default > 0
        if has_number and NEUTRAL_MEANING.get(name) == "n_heads":
            counts.append(name)
    return tuple(counts)


def _is_rotation(parameter: inspect.Parameter) -> bool:
    """Return whether a required parameter is of a rotation, and cannot be None."""
    meaning, annotation = NEUTRAL_MEANING.get(parameter.name), annotation_of(parameter)
    if "None" in annotation or "Optional" in annotation:
        return False
    if meaning == "rotation":
        return "tuple" in annotation.lower()
    return meaning in ("cosines", "sines") and not annotation.startswith(NUMBERS)


def _names_of(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters]


def required_inputs(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters without a default that may be inputs.

    These are the first one, and others of no other meaning.
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
    if not has_input and own and own[0].default is None:
        return [own[0], *required]
    return required


def _one_input_and_others(
    parameters: Mapping[str, inspect.Parameter], inputs: tuple[str, ...], memory: str | None
) -> tuple[bool, list[str]]:
    """Return whether a function can be called with one input, and what it requires beside inputs.

    Three required parameters without known names are query, key and value.
    """
    required = [p for p in _required(parameters) if p.name not in (*inputs, memory)]
    if inputs:
        return False, _names_of(required)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in required)
    neutral = [p.name for p in required[1:] if p.name in NEUTRAL_MEANING]
    if variadic or len(required) - len(neutral) in (0, 3):
        return False, neutral
    return _takes_one(parameters, required[0], memory), _names_of(required[1:])


def _takes_one(
    parameters: Mapping[str, inspect.Parameter], first: inspect.Parameter, memory: str | None
) -> bool:
    """Return whether the first parameter can be the only input."""
    needs_memory = memory is not None and parameters[memory].default is inspect.Parameter.empty
    return first.kind in GIVEN and not needs_memory
