"""How a module or a kernel is called: by its own names, with inputs and masks in its own form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mha.implementations.adapters.mask_forms import MaskFormat, Sizes, allow_all, shape_mask
from mha.implementations.adapters.names import (
    DESTINATION_NAMES,
    MODULE,
    NEUTRAL_MEANING,
    WIDE_LENGTHS,
)
from mha.implementations.adapters.outputs import as_output, returned_or_written
from mha.implementations.adapters.reading import limits
from mha.implementations.adapters.score_arguments import ScoreArguments
from mha.implementations.adapters.signature import Signature
from mha.implementations.adapters.tables import no_rotation, table_of, table_without_rotation
from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Claims, Config, Options, Output, Rotary, causal_mask, join_causal
from mha.spec.masks import form_of


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


def call_by_name(
    label: str,
    signature: Signature,
    claims: Claims,
    layout: str,
    masks: MaskFormat,
    weights: int | None = None,
) -> CallByName:
    """Return a `Call` by a function's own names; inputs that it does not name go by position.

    A function without a causal flag gets the causal mask, aligned as claimed, joined to the mask.
    One with a single input for key and value gets the key; one with a single input gets the query.

    label: the name in messages.
    layout: the axes of the inputs in order, among them b (batch) and l (length).
    weights: as for `as_output`.

    Raises ImplementationError for claims that no call can express.
    """
    most = limits(signature, masks, claims)
    if most:
        lower = ", ".join(f"{name}={value!r}" for name, value in most.items())
        claimed = ", ".join(f"{name}={_plain(getattr(claims, name))}" for name in most)
        raise ImplementationError(
            f"{label}: no call of it can express the claims {claimed}; claim {lower} or pass"
            " call=..."
        )
    alone = None
    if signature.alone is not None:
        of_one = replace(claims, cross_attention=False)
        alone = call_by_name(label, signature.alone, of_one, layout, masks, weights)
    axes = layout.replace("(b h)", "b").replace("(h d)", "d").split()
    return CallByName(
        label,
        signature,
        claims,
        masks,
        batch_axis=axes.index("b"),
        length_axis=axes.index("l"),
        width_axis=axes.index("d"),
        of_heads="h" in layout and "(h d)" not in layout,
        merged="(b h)" in layout,
        weights=weights,
        alone=alone,
    )


@dataclass(frozen=True)
class CallByName:
    """A `Call` by the names of a function's parameters; made by `call_by_name`.

    batch_axis, length_axis, width_axis: of the inputs.
    of_heads: whether the inputs are of heads, so that their last axis is d_k.
    merged: whether the batch's axis is that of the heads too.
    same_shape: whether the output has the axes of the query.
    n_heads: H, to which masks are expanded that the function takes for each head.
    kv_heads: H_kv.
    head_dim: d_k.
    weights: as for `as_output`.
    past: the number of positions before those of the call, whose keys a cache has.
    keys: the number of keys, if that is not the length of the memory.
    more: further arguments.
    alone: for query, key and value that are one tensor, the call that leaves out a memory; None if
        it is always passed.
    """

    label: str
    signature: Signature
    claims: Claims
    masks: MaskFormat
    batch_axis: int
    length_axis: int
    width_axis: int = -1
    of_heads: bool = False
    merged: bool = False
    same_shape: bool = True
    n_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    weights: int | None = None
    past: int = 0
    keys: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    alone: CallByName | None = None

    @property
    def rotated_width(self) -> int:
        """The number of columns of a head that are rotated; all, where nothing is claimed."""
        rotary = self.claims.rotary
        return rotary.width(self.head_dim) if rotary else self.head_dim

    def built_for(self, config: Config) -> CallByName:
        """Return the call of an attention with this configuration."""
        batch_axis, length_axis = self.batch_axis, self.length_axis
        if config.length_first:
            batch_axis, length_axis = length_axis, batch_axis
        alone = self.alone
        if alone is not None:
            alone = alone.built_for(config)
        return replace(
            self,
            batch_axis=batch_axis,
            length_axis=length_axis,
            n_heads=config.n_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            alone=alone,
        )

    def __call__(
        self, target: Any, /, query: Tensor, key: Tensor, value: Tensor, **given: Any
    ) -> Output:
        """Call the target with its own names and its own format of masks."""
        if self.alone and query is key is value:
            return self.alone(target, query, key, value, **given)
        options = Options(**given)
        sizes = self._sizes(query, key)
        inputs, arguments = self._inputs(query, key, value)
        keys, rest = self._split(options.mask, sizes)
        rest, is_causal = self._causal(options.change(mask=rest), sizes, query.device)
        masks = self._masks(keys, rest, sizes, query.dtype)
        versions = versions_of(masks.values())
        arguments.update(masks)  # not |=, which Dynamo of torch 2.6 cannot trace
        if self.signature.mask in masks:
            arguments[self.signature.mask] = self.masks.held(masks[self.signature.mask])
        arguments.update(self._flags(options.change(is_causal=is_causal)))
        others = self._others(query, sizes)
        arguments.update({name: value for name, value in others.items() if name not in masks})
        rotary = self.claims.rotary
        if rotary:
            for name in self.signature.tables:
                layout = self.signature.rotation
                arguments[name] = table_of(
                    name, rotary, layout, query, sizes, self.head_dim, self.past
                )
        arguments.update(self._of_scores(options, query))
        arguments.update(self.more)
        returned = returned_or_written(target(*inputs, **arguments), arguments)
        if options.mask is not None and versions_of(masks.values()) != versions:
            increment_version(options.mask)  # what was changed in place may be its translation
        shape = self._shape_of_output(query, value) if self.same_shape else None
        return as_output(returned, shape, self.weights, self.claims.lse)

    def _shape_of_output(self, query: Tensor, value: Tensor) -> torch.Size:
        """Return the shape of the query, with the width of the values where that may differ."""
        shape = [*query.shape]
        if self.claims.value_width:
            shape[self.width_axis] = value.shape[self.width_axis]
        return torch.Size(shape)

    def _flags(self, options: Options) -> dict[str, bool | str]:
        """Return the flags by the function's own names."""
        names = self.signature
        flags = self._causal_flag(is_causal=options.is_causal)
        if names.need_weights:
            flags[names.need_weights] = options.need_weights
        if names.average and (options.need_weights or names.average in names.required):
            flags[names.average] = False
        if names.grouped and self.kv_heads < self.n_heads:
            flags[names.grouped] = True
        return flags

    def _causal_flag(self, *, is_causal: bool) -> dict[str, bool | str]:
        """Return the causal flag by its own name, or the word in the place of a mask."""
        names, word = self.signature, self.masks.causal_word
        if names.is_causal:
            return {names.is_causal: is_causal}
        if not is_causal:
            return {}
        if names.mask and word and self.claims.causal:
            return {names.mask: word}
        raise UnsupportedCallError(f"{self.label} takes no causal flag")

    def _of_scores(self, options: Options, query: Tensor) -> dict[str, Any]:
        """Return what is said about the scores, by the function's own names."""
        return self._score_arguments.of(options, query)

    @property
    def _score_arguments(self) -> ScoreArguments:
        names = self.signature
        return ScoreArguments(self.label, names.scores, self.claims, names.none_by_default)

    def _others(self, query: Tensor, sizes: Sizes) -> dict[str, Any]:
        """Return what each call is given beside inputs, masks and flags."""
        others = {name: self._neutral(name, query, sizes) for name in self.signature.others}
        for name in self.signature.acting:
            neutral = self._neutral(name, query, sizes)
            if neutral is not None:
                others[name] = neutral
        return others

    def _neutral(self, name: str, query: Tensor, sizes: Sizes) -> Any:
        """Return what a required parameter is given, by its name; None for an unknown one."""
        if name in self.signature.rotations:
            if self.signature.shaped:
                layout = self.signature.rotation
                width = Rotary(part=self.signature.part).width(self.head_dim)
                return table_without_rotation(name, layout, query, sizes, width)
            return no_rotation(name, query)
        if name in self.signature.lengths:
            return self._all_lengths(name, query, sizes)
        without = self._score_arguments.without(name, query, self.n_heads)
        if without is not None:
            return without
        if name in DESTINATION_NAMES:
            return torch.full_like(query, torch.nan)
        values = {
            "dropout": 0.0,
            "n_heads": self.n_heads,
            "kv_heads": self.kv_heads,
            "groups": self.n_heads // self.kv_heads,
            "module": MODULE,
            "start": self.past,
            "batch": sizes[0],
            "places": torch.zeros(sizes[0], sizes[2], dtype=torch.long, device=query.device),
            "rows": sizes[2],
            "columns": 1,
            "tile": 16,
        }
        if self.of_heads:  # the scale is known for heads only
            values["scale"] = query.shape[-1] ** -0.5
        return values.get(NEUTRAL_MEANING.get(name, ""))

    def _all_lengths(self, name: str, query: Tensor, sizes: Sizes) -> Tensor:
        """Return lengths of items that leave out no key, or no query."""
        batch, _, queries, keys = sizes
        length = keys
        if self.signature.scores.get("query_lengths") == (name,):
            length = queries
        dtype = torch.int64 if name in WIDE_LENGTHS else torch.int32
        return torch.full((batch,), length, dtype=dtype, device=query.device)

    def _sizes(self, query: Tensor, key: Tensor) -> Sizes:
        """Return B, H, L and S; without a batch, B is 1."""
        if query.ndim == 2:
            return 1, self.n_heads, len(query), len(key)
        keys = self.keys or key.shape[self.length_axis]
        batch = query.shape[self.batch_axis]
        if self.merged:
            batch //= self.n_heads
        return batch, self.n_heads, query.shape[self.length_axis], keys

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
            if names.query:
                return (), {names.memory: key, names.query: query}
            return (query,), {names.memory: key}
        if not names.one_input:
            return (query, key, value), {}
        if not (query is key is value):
            raise UnsupportedCallError(
                f"{self.label} takes one input: query, key and value must be one tensor"
            )
        if names.query:
            return (), {names.query: query}
        return (query,), {}

    def _split(self, mask: Tensor | None, sizes: Sizes) -> tuple[Tensor | None, Tensor | None]:
        """Split a mask as `MaskFormat.split` does.

        A `mask` beside a memory, of keys, hides those of the query: then all is padding.
        """
        names = self.signature
        is_of_query = names.memory and names.mask == "mask" and not {"h", "l"} & self.masks.axes
        if mask is None or not (self.masks.padding and is_of_query):
            return self.masks.split(self.label, mask)
        if mask.is_floating_point() and "float" in self.claims.masks:  # which is added
            return self.masks.split(self.label, mask)
        return shape_mask(self.label, mask, "b s", sizes), None

    def _causal(
        self, options: Options, sizes: Sizes, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """Return the mask and the causal flag to pass on: without a flag, that becomes a mask."""
        mask, is_causal = options.mask, options.is_causal
        if mask is None and self.masks.required:
            mask = allow_all(sizes, device)
        if self.masks.causal_by_default and mask is None:
            return None if is_causal else allow_all(sizes, device), False
        if self.claims.always_causal:
            if not is_causal:
                raise UnsupportedCallError(f"{self.label} is always causal")
            return mask, False
        if is_causal and self.claims.causal and not self._says_causal(mask):
            causal = causal_mask(*sizes[2:], self.claims.causal, device)
            return join_causal(mask, causal[None, None]), False
        return mask, is_causal

    def _says_causal(self, mask: Tensor | None) -> bool:
        """Return whether a flag says that a call is causal, or a word in the place of a mask."""
        return bool(self.signature.is_causal or (mask is None and self.masks.causal_word))

    def _masks(
        self, keys: Tensor | None, mask: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        """Return the masks by the function's own names, in its own format.

        keys: (B, S), those that are not padding.
        """
        names = self.signature
        given: dict[str, Tensor | None] = {}
        for name in (names.mask, names.padding):
            if name in names.required:
                given[name] = None
        if mask is not None:
            if not names.mask:
                raise UnsupportedCallError(f"{self.label} takes no mask")
            # A mask that is not claimed is not translated: refusing it is the function's task.
            claimed = form_of(mask) in self.claims.masks
            given[names.mask] = self.masks.translate(
                self.label, mask, sizes, dtype, claimed=claimed
            )
            for name, shape in self.masks.beside.items():
                given[name] = self.masks.allowing_all(self.label, shape, sizes, dtype, mask.device)
        if keys is not None and names.padding:
            given[names.padding] = self.masks.translate_padding(keys, sizes, dtype)
        return given


def _plain(value: Any) -> str:
    """Return the code of a claim, with an ordinary set for a frozen one."""
    return repr(set(value)) if isinstance(value, frozenset) else repr(value)


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place; 0 where torch does not count it."""
    counts = not torch.compiler.is_compiling()
    versions = []
    for tensor in tensors:
        is_counted = counts and tensor is not None and not tensor.is_inference()
        versions.append(tensor._version if tensor is not None and is_counted else 0)
    return versions
