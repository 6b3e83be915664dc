"""How a module or a kernel is called: by its own names, with the inputs, the masks and the flags in
its own form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mha.implementations.adapters.mask_forms import MaskFormat, Sizes, allow_all, shape_mask
from mha.implementations.adapters.names import MODULE, NEUTRAL_MEANING, OPTION_NAMES, PADDING_NAMES
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.signature import (
    Signature,
    call_parameters,
    signature_of,
    takes_two,
)
from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Claims, Config, Options, Output, causal_mask, join_causal
from mha.spec.masks import form_of
from mha.spec.scores import Bounds

# Options that ask for a result, which a function may return without being asked.
RESULTS = ("return_lse",)


class Call(Protocol):
    """Calls a module or a kernel with a canonical mask, which it translates."""

    def __call__(  # noqa: PLR0913  the arguments of an attention
        self,
        target: Any,
        /,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> Output:
        """Return the output, and the weights if they are requested and the target returns them.

        target: the module or kernel. The other arguments are those of `mha.spec.Attention`.
        """
        ...


def read_signature(
    label: str,
    function: Callable[..., Any],
    masks: MaskFormat,
    *,
    self_attention: bool = False,
    memory_optional: bool = False,
    query_last: bool | None = None,
) -> Signature:
    """Return what the parameters of a function mean, if it can be called by name with these masks.

    label: the name in messages. self_attention: as for `signature_of`. memory_optional, query_last:
    as for `from_module`.

    Raises ImplementationError for a signature that cannot be read, an unknown convention or shape
    of masks, and where a convention is declared for which the function has no parameter, or inputs
    that it does not take.
    """
    masks.validate(label)
    try:
        parameters = call_parameters(function)
    except ValueError as error:
        raise ImplementationError(
            f"{label}: {error}; wrap it in a Python function or pass call=..."
        ) from error
    options: dict[str, Any] = {"padding": masks.padding is not None, "query_last": query_last}
    signature = signature_of(parameters, **options, self_attention=self_attention)
    _require_masks(label, signature, masks, ", ".join(parameters))
    if query_last is not None and not takes_two(parameters):
        raise ImplementationError(
            f"{label}: query_last={query_last}, but it does not take two inputs; leave that out"
        )
    if memory_optional and signature.has_optional_memory:
        return replace(signature, alone=signature_of(parameters, **options, self_attention=True))
    if memory_optional:
        raise ImplementationError(
            f"{label}: memory_optional=True, but its calls have no memory that has a default; leave"
            " that out"
        )
    return signature


def _require_masks(label: str, signature: Signature, masks: MaskFormat, parameters: str) -> None:
    """Raise ImplementationError where a function has no parameter for masks of a declared
    convention.
    """
    needs = {
        "mask": (masks.convention, signature.mask),
        "padding": (masks.padding, signature.padding),
    }
    for option, (convention, name) in needs.items():
        if convention and not name:
            known = ", ".join(OPTION_NAMES["mask"] if option == "mask" else PADDING_NAMES)
            kind = (
                "a padding mask"
                if option == "padding"
                else "another mask"
                if masks.padding
                else "a mask"
            )
            raise ImplementationError(
                f"{label}: {option}={convention!r}, but none of its parameters ({parameters}) has a"
                f" known name of {kind} ({known}); pass {option}=None or call=..."
            )


def limits(signature: Signature, masks: MaskFormat, claims: Claims) -> dict[str, Any]:
    """Return the claims that no call of a function can express, each with the most that one can.

    >>> parameters = call_parameters(lambda x, mask=None: x)
    >>> limits(signature_of(parameters), MaskFormat(shape="b s"), Claims(per_head_mask=False))
    {'cross_attention': False, 'per_query_mask': False, 'causal': None}
    """
    most: dict[str, Any] = {}
    if signature.memory and claims.cross_attention is True:
        most["cross_attention"] = "memory"
    elif signature.one_input and not signature.memory and claims.cross_attention:
        most["cross_attention"] = False
    if claims.masks:
        most |= masks.limits(claims)
    joined = masks.convention is not None and "l" in masks.axes
    if claims.causal and not (claims.always_causal or signature.is_causal or joined):
        most["causal"] = None
    return most


def call_by_name(
    label: str,
    signature: Signature,
    claims: Claims,
    layout: str,
    masks: MaskFormat,
    weights: int | None = None,
) -> CallByName:
    """Return a `Call` that passes everything by the function's own names, and inputs it does not
    name by position.

    A function without a causal flag gets the causal mask, aligned as claimed, joined to the mask.
        One with a single input for key and value gets the key; one with a single input gets the
        query.
    label: the name in messages. layout: the axes of the inputs in order, among them b (batch) and l
        (length). weights: as for `as_output`.

    Raises ImplementationError for claims that no call can express.
    """
    if most := limits(signature, masks, claims):
        lower = ", ".join(f"{name}={value!r}" for name, value in most.items())
        claimed = ", ".join(f"{name}={_plain(getattr(claims, name))}" for name in most)
        raise ImplementationError(
            f"{label}: no call of it can express the claims {claimed}; claim {lower} or pass"
            " call=..."
        )
    axes = layout.replace("(b h)", "b").replace("(h d)", "d").split()
    of_heads, merged = "h" in layout and "(h d)" not in layout, "(b h)" in layout
    batch, length = axes.index("b"), axes.index("l")
    call = CallByName(
        label, signature, claims, masks, batch, length, of_heads, merged, weights=weights
    )
    if signature.alone is None:
        return call
    alone = call_by_name(
        label, signature.alone, replace(claims, cross_attention=False), layout, masks, weights
    )
    return replace(call, alone=alone)


@dataclass(frozen=True)
class CallByName:
    """A `Call` by the names of a function's parameters; made by `call_by_name`.

    of_heads: whether the inputs are of heads, so that their last axis is d_k. merged: whether the
    batch's axis is that of the heads too. same_shape: whether the output has the shape of the
    query. n_heads: H, to which masks are expanded that the function takes for each head. weights:
    as for `as_output`. alone: for query, key and value that are one tensor, the call that leaves
    out a memory; None if it is always passed. head_dim: d_k.
    """

    label: str
    signature: Signature
    claims: Claims
    masks: MaskFormat
    batch_axis: int
    length_axis: int
    of_heads: bool = False
    merged: bool = False
    same_shape: bool = True
    n_heads: int = 1
    head_dim: int = 1
    weights: int | None = None
    alone: CallByName | None = None

    def built_for(self, config: Config) -> CallByName:
        """Return the call of an attention with this configuration."""
        axes = self.batch_axis, self.length_axis
        batch_axis, length_axis = reversed(axes) if config.length_first else axes
        alone = self.alone and self.alone.built_for(config)
        call = replace(self, batch_axis=batch_axis, length_axis=length_axis, alone=alone)
        return replace(call, n_heads=config.n_heads, head_dim=config.head_dim)

    def __call__(
        self, target: Any, /, query: Tensor, key: Tensor, value: Tensor, **given: Any
    ) -> Output:
        """Call the target with its own names and its own format of masks."""
        if self.alone and query is key is value:
            return self.alone(target, query, key, value, **given)
        options, sizes = Options(**given), self._sizes(query, key)
        inputs, arguments = self._inputs(query, key, value)
        keys, rest = self._split(options.mask, sizes)
        rest, is_causal = self._causal(options.change(mask=rest), sizes, query.device)
        masks = self._masks(keys, rest, sizes, query.dtype)
        versions = versions_of(masks.values())
        arguments.update(masks)  # not |=, which Dynamo of torch 2.6 cannot trace
        arguments.update(self._flags(options.change(is_causal=is_causal)))
        arguments.update(
            {name: self._neutral(name, query, sizes) for name in self.signature.others}
        )
        arguments.update(self._of_scores(options, query))
        returned = target(*inputs, **arguments)
        if options.mask is not None and versions_of(masks.values()) != versions:
            increment_version(options.mask)  # what was changed in place may be its translation
        return as_output(
            returned, query.shape if self.same_shape else None, self.weights, self.claims.lse
        )

    def _flags(self, options: Options) -> dict[str, bool]:
        """Return the flags by the function's own names."""
        names = self.signature
        flags: dict[str, bool] = {}
        if names.is_causal:
            flags[names.is_causal] = options.is_causal
        elif options.is_causal:
            raise UnsupportedCallError(f"{self.label} takes no causal flag")
        if names.need_weights:
            flags[names.need_weights] = options.need_weights
        if names.average and (options.need_weights or names.average in names.required):
            flags[names.average] = False
        return flags

    def _of_scores(self, options: Options, query: Tensor) -> dict[str, Any]:
        """Return what is said about the scores, by the function's own names."""
        arguments = {}
        for option, value in options.of_scores.items():
            if option == "window":
                arguments.update(self._window(value))
                continue
            if option in ("sinks", "alibi"):
                in_dtype = option == "sinks" and self.claims.scores.sinks == "input"
                dtype = query.dtype if in_dtype else torch.float32
                value = torch.as_tensor(value, dtype=dtype, device=query.device)
            name = getattr(self.signature, option)
            if option == "softcap" and not value and name in self.signature.none_by_default:
                value = None  # what stands for no cap, where 0 is one
            if name:
                arguments[name] = value
            elif option not in RESULTS:
                raise UnsupportedCallError(f"{self.label} takes no {option}")
        return arguments

    def _window(self, bounds: Bounds) -> dict[str, Any]:
        """Return a window by the function's own names, in the form that is claimed."""
        declared, names = self.claims.scores.window, self.signature.window
        if declared is None or not names:
            raise UnsupportedCallError(f"{self.label} takes no window")
        numbers = declared.numbers(bounds)
        if len(names) == len(numbers):
            return dict(zip(names, numbers, strict=True))
        if len(names) > 1:
            raise UnsupportedCallError(
                f"{self.label} takes a window as two numbers, {' and '.join(names)}"
            )
        return {names[0]: numbers}

    def _neutral(self, name: str, query: Tensor, sizes: Sizes) -> Any:
        """Return what a required parameter is given, by its name; the scale is known for heads of
        query alone.
        """
        if name in self.signature.rotations:
            return _no_rotation(
                name, query, (sizes[2], self.head_dim // 2) if self.signature.pairs else (1, 1, 1)
            )
        scale = query.shape[-1] ** -0.5 if self.of_heads else None
        values = {
            "dropout": 0.0,
            "n_heads": self.n_heads,
            "scale": scale,
            "module": MODULE,
            "start": 0,
            "rows": sizes[2],
            "columns": 1,
            "tile": 16,
        }
        return values.get(NEUTRAL_MEANING.get(name, ""))

    def _sizes(self, query: Tensor, key: Tensor) -> Sizes:
        """Return B, H, L and S; without a batch, B is 1."""
        if query.ndim == 2:
            return 1, self.n_heads, len(query), len(key)
        axis, batch = self.length_axis, query.shape[self.batch_axis]
        return (
            batch // self.n_heads if self.merged else batch,
            self.n_heads,
            query.shape[axis],
            key.shape[axis],
        )

    def _inputs(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the inputs that are passed by position, and those that are passed by name."""
        names = self.signature
        if names.inputs:
            return (), dict(zip(names.inputs, (query, key, value), strict=True))
        if names.memory and (self.claims.cross_attention or names.memory in names.required):
            if key is not value:
                raise UnsupportedCallError(
                    f"{self.label} takes key and value as one input, {names.memory}"
                )
            return (
                ((), {names.memory: key, names.query: query})
                if names.query
                else ((query,), {names.memory: key})
            )
        if not names.one_input:
            return (query, key, value), {}
        if not (query is key is value):
            raise UnsupportedCallError(
                f"{self.label} takes one input: query, key and value must be one tensor"
            )
        return (query,), {}

    def _split(self, mask: Tensor | None, sizes: Sizes) -> tuple[Tensor | None, Tensor | None]:
        """Split a mask as `MaskFormat.split` does; beside a memory, `mask` is of the query, and all
        is padding.
        """
        is_added = mask is not None and mask.is_floating_point() and "float" in self.claims.masks
        of_query = (
            self.signature.memory
            and self.signature.mask == "mask"
            and not {"h", "l"} & self.masks.axes
        )
        if mask is None or is_added or not (self.masks.padding and of_query):
            return self.masks.split(self.label, mask)
        return shape_mask(self.label, mask, "b s", sizes), None

    def _causal(
        self, options: Options, sizes: Sizes, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """Return the mask and the causal flag to pass on: the flag becomes a mask where there is no
        flag.
        """
        mask, is_causal = options.mask, options.is_causal
        if mask is None and self.masks.required:
            mask = allow_all(sizes, device)
        if self.masks.causal_by_default and mask is None:
            return None if is_causal else allow_all(sizes, device), False
        if self.claims.always_causal:
            if not is_causal:
                raise UnsupportedCallError(f"{self.label} is always causal")
            return mask, False
        if is_causal and not self.signature.is_causal and self.claims.causal:
            return (
                join_causal(mask, causal_mask(*sizes[2:], self.claims.causal, device)[None, None]),
                False,
            )
        return mask, is_causal

    def _masks(
        self, keys: Tensor | None, mask: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        """Return the masks by the function's own names, in its own format; keys: (B, S), those that
        are not padding.
        """
        names = self.signature
        given: dict[str, Tensor | None] = {
            name: None for name in (names.mask, names.padding) if name in names.required
        }
        if mask is not None and names.mask:
            # A mask that is not claimed is not translated: refusing it is the function's task.
            claimed = form_of(mask) in self.claims.masks
            given[names.mask] = self.masks.translate(
                self.label, mask, sizes, dtype, claimed=claimed
            )
        elif mask is not None:
            raise UnsupportedCallError(f"{self.label} takes no mask")
        if keys is not None and names.padding:
            given[names.padding] = self.masks.translate_padding(keys, sizes, dtype)
        return given


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place; 0 where torch does not count it."""
    counts = not torch.compiler.is_compiling()
    return [x._version if counts and x is not None and not x.is_inference() else 0 for x in tensors]


def _plain(value: Any) -> str:
    return repr(set(value)) if isinstance(value, frozenset) else repr(value)


def _no_rotation(
    name: str, query: Tensor, shape: tuple[int, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    """Return cosines of 1 or sines of 0, or both; of one element each, for any number of positions
    and any width.
    """
    cosines, sines = query.new_ones(shape), query.new_zeros(shape)
    if (
        NEUTRAL_MEANING[name] == "positions"
    ):  # complex numbers, which have at least 32 bits for each part
        return torch.complex(
            *(x.to(torch.promote_types(x.dtype, torch.float32)) for x in (cosines, sines))
        )
    return {"cosines": cosines, "sines": sines}.get(NEUTRAL_MEANING[name], (cosines, sines))
