"""`from_kernel`: judge a function that computes softmax(q k^T / sqrt(d_k) + mask) v."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from einops import EinopsError, rearrange
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mha.implementations.adapters.calling import (
    Call,
    CallByName,
    call_by_name,
    read_signature,
    versions_of,
)
from mha.implementations.adapters.mask_forms import MaskedNumber, MaskFormat
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.signature import Signature, numbers_of_heads
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims, Config, MaskConvention, Options, Output, Weights, validate_call

# Layouts of heads that share an axis with the batch, or with the columns.
MERGED_LAYOUTS = ("(b h) l d", "b l (h d)")
# A kernel of a single head, or of the heads of one item, is called for one after another of these.
AS_MANY = {"l d": "(b h) l d", "l h d": "b l h d"}
# How many of query, key and value are one tensor, and the place of the first of them.
PACKED = {"3": 0, "2": 1}
PARAMETERS = tuple(f"{kind}_{role}" for kind in "wb" for role in "qkvo")


def from_kernel(  # noqa: PLR0913  the public options, each by name
    kernel: Callable[..., Any],
    *,
    layout: str = "b h l d",
    mask: MaskConvention | None = "keep",
    mask_shape: str | None = None,
    mask_numbers: bool = False,
    masked_number: MaskedNumber = "-inf",
    causal_by_default: bool = False,
    contiguous: bool = False,
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
) -> KernelImplementation:
    """Adapt a kernel to the contract: it is judged on query, key and value themselves, without
    projections.

    kernel: called with query (B, H, L, d_k), key and value (B, H_kv, S, d_k), in `layout`. It
        scales the scores by 1/sqrt(d_k) itself, and returns the context in the layout of the query,
        or the context and the weights (B, H, L, S). It must take heads however they lie in memory,
        unless `contiguous`: those of a query that is not contiguous lie otherwise than those of the
        key. H_kv is H, unless `Claims.grouped_query` is claimed, or 1 with `Claims.multi_query`.
    layout: the axes in order: b (batch), h (heads), l (length) and d (head_dim), separated by
        spaces; or "(b h) l d" or "b l (h d)", where the kernel has the heads in the batch, or
        splits them itself; or "l d" or "l h d", where it takes one head, or one item, and is called
        for each. An axis 3, as in "b l 3 h d", says that query, key and value are one tensor, and
        an axis 2 that key and value are. If the context has other axes, they follow: "b h l d -> b
        l (h d)".
    contiguous: whether it is given contiguous heads, and gradients of its context, alone, since it
        raises for others.
    mask, mask_shape, mask_numbers, masked_number, causal_by_default, call, claims, name: as for
        `from_module`; by default, the kernel claims that it returns no weights.

    Raises ImplementationError for an invalid layout, a signature that is not recognised, and claims
    of extras.

    >>> def attend(q, k, v):
    ...     return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
    >>> implementation = from_kernel(attend, mask=None)
    >>> config = Config(d_model=6, n_heads=2)
    >>> attention = implementation.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
    >>> query, memory = torch.zeros(5, 3, 6, dtype=torch.float64), torch.zeros(5, 7, 6, dtype=torch.float64)
    >>> attention(query, memory, memory).output.shape
    torch.Size([5, 3, 6])
    """
    label = name or str(getattr(kernel, "__name__", "kernel"))
    axes = KernelAxes.read(label, layout)
    if claims is None:
        claims = (
            Claims(returns_weights=False)
            if mask
            else Claims(masks=(), causal=None, returns_weights=False)
        )
    if claims.extras:
        raise ImplementationError(
            f"{label}: claims has the extras {sorted(claims.extras)}, but the projections around a"
            " kernel have none; adapt a module instead"
        )
    masks = MaskFormat(
        mask,
        mask_shape,
        mask_numbers,
        causal_by_default=causal_by_default,
        masked_number=masked_number,
    )
    if call is not None and masks != MaskFormat(mask):
        raise ImplementationError(
            f"{label}: call=... is given masks as the contract has them, so mask_shape,"
            " mask_numbers, masked_number and causal_by_default have no effect; leave them out"
        )
    if call is None:
        signature = axes.with_heads(kernel, read_signature(label, axes.unpacked(kernel), masks))
        by_name = call_by_name(label, signature, claims, axes.heads, masks)
        call = replace(by_name, same_shape=axes.context == axes.heads)
    claims = replace(claims, projections=False, weight_gradients=False)
    return KernelImplementation(label, claims, kernel, layout, call, contiguous)


def function_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return what has the parameters of a kernel, which may be a module."""
    return kernel.forward if isinstance(kernel, nn.Module) else kernel


@dataclass(frozen=True)
class KernelAxes:
    """A `layout` of `from_kernel`.

    heads: the axes of query, key and value. context: those of the context. packed: "3" or "2", if
    that many of the inputs are one tensor, stacked along the axis `stacked`. one_by_one: whether
    the kernel is called for each.

    >>> KernelAxes.read("Mine", "b l 3 h d -> b l (h d)")
    KernelAxes(heads='b l h d', context='b l (h d)', packed='3', stacked=2, one_by_one=False)
    """

    heads: str
    context: str
    packed: str
    stacked: int
    one_by_one: bool = False

    @classmethod
    def read(cls, label: str, layout: str) -> KernelAxes:
        """Read a layout; raises ImplementationError for an invalid one, with the label."""
        inputs, _, context = (part.strip() for part in AS_MANY.get(layout, layout).partition("->"))
        packed = next((count for count in PACKED if count in inputs.split()), "")
        heads = " ".join(axis for axis in inputs.split() if axis != packed)
        for axes in (heads, context or heads):
            if (
                sorted(axes.replace("(h d)", "h d").split()) != ["b", "d", "h", "l"]
                and axes not in MERGED_LAYOUTS
            ):
                raise ImplementationError(
                    f"{label}: layout must name b, h, l and d once each, as 'b h l d', or be one of"
                    f" {', '.join(map(repr, (*MERGED_LAYOUTS, *AS_MANY)))}, but is {layout!r}"
                )
        stacked = inputs.split().index(packed) if packed else 0
        return cls(heads, context or heads, packed, stacked, one_by_one=layout in AS_MANY)

    @property
    def takes_all_heads(self) -> bool:
        """Whether the kernel takes query, key and value, each with all its heads."""
        return not (self.packed or self.one_by_one)

    def with_heads(self, kernel: Callable[..., Any], signature: Signature) -> Signature:
        """Return a signature whose number of heads is given though it has a default, where the
        kernel splits heads.
        """
        if "(h d)" not in self.heads:
            return signature
        heads = numbers_of_heads(inspect.signature(function_of(kernel)).parameters)
        return replace(signature, others=(*signature.others, *heads))

    def unpacked(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of query, key and value, of all heads, for a kernel that takes them
        otherwise.
        """
        function = function_of(kernel)
        if self.one_by_one:
            return _one_by_one(kernel)
        if not self.packed:
            return function
        place = PACKED[self.packed]

        @wraps(function)
        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            inputs = (query, key, value)
            return kernel(*inputs[:place], torch.stack(inputs[place:], self.stacked), **options)

        _, *options = [*inspect.signature(function).parameters.values()][place:]
        names = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("query", "key", "value")
        ]
        attend.__signature__ = inspect.Signature([*names, *options])  # type: ignore[attr-defined]  # read by `inspect`
        return attend


@dataclass(frozen=True, eq=False)
class KernelImplementation:
    """A kernel as an implementation; made by `from_kernel`."""

    name: str
    claims: Claims
    kernel: Callable[..., Any]
    layout: str
    call: Call
    contiguous: bool = False

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> KernelAttention:
        """Put four projections around the kernel.

        Raises ValueError for an invalid configuration, and ImplementationError for weights of
        another configuration.
        """
        config.validate()
        expected = _shapes(config)
        given = {name: tuple(tensor.shape) for name, tensor in weights.named()}
        if given != expected or config.extra_keys:
            raise ImplementationError(
                f"{self.name}: {config} needs weights of the shapes {expected} and no extra keys, "
                f"but the weights have {given}"
            )
        if isinstance(self.kernel, nn.Module):
            self.kernel.to(device=device, dtype=dtype)
        module = KernelAttention(self, config, weights.to(dtype, device))
        return module if self.claims.gradients else module.requires_grad_(False)


class KernelAttention(nn.Module):
    """Multi-head attention around a kernel."""

    def __init__(self, adapter: KernelImplementation, config: Config, weights: Weights) -> None:
        super().__init__()
        self.config, self.axes = config, KernelAxes.read(adapter.name, adapter.layout)
        self.kernel, self.contiguous = adapter.kernel, adapter.contiguous
        self.call, self.claims = adapter.call, adapter.claims
        if isinstance(self.call, CallByName):
            self.call = self.call.built_for(config)
        for name in PARAMETERS:
            given = getattr(weights, name) if config.projected else None
            held = (
                None
                if given is None
                else nn.Parameter(given.detach().clone(memory_format=torch.contiguous_format))
            )
            self.register_parameter(name, held)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Project, call the kernel, and project back; see `mha.spec.Attention`."""
        options = Options(**given)
        validate_call(self.config, query, key, value, options.mask, masks=self.claims.masks)
        inputs = (query, key, value)
        heads = [self._heads(x, role) for x, role in zip(inputs, "qkv", strict=True)]
        versions = versions_of(heads)
        shape = heads[0].shape if self.axes.context == self.axes.heads else None
        kernel = self.kernel if self.axes.takes_all_heads else self.axes.unpacked(self.kernel)
        context, weights, lse = as_output(
            self.call(kernel, *heads, **options.arguments), shape, lse=self.claims.lse
        )
        for x, before, after in zip(inputs, versions, versions_of(heads), strict=True):
            if before != after:
                increment_version(x)  # since a caller's heads would be changed
        try:
            if context.requires_grad and self.contiguous:
                context.register_hook(torch.Tensor.contiguous)
            elif context.requires_grad and not (
                query.is_contiguous() or torch.compiler.is_compiling()
            ):
                context.register_hook(_laid_out_otherwise)
            joined = rearrange(context, f"{self.axes.context} -> b l (h d)", h=self.config.n_heads)
        except EinopsError:
            raise ValueError(
                f"its context has the shape {tuple(context.shape)}, not {self.axes.context!r}"
            ) from None
        return Output(self._project(joined, "o"), weights, self._lse(lse, len(query)))

    def _lse(self, lse: Any, batch: int) -> Any:
        """Return a log-sum-exp with the axes (B, H, L), if it is claimed."""
        declared = self.claims.lse
        if declared is None or not isinstance(lse, Tensor):
            return None
        try:
            return rearrange(lse, f"{declared.axes} -> b h l", h=self.config.n_heads, b=batch)
        except EinopsError:
            raise ValueError(
                f"its log-sum-exp has the shape {tuple(lse.shape)}, not {declared.layout!r}, which"
                " Claims.lse says"
            ) from None

    def _heads(self, x: Tensor, role: str) -> Tensor:
        """Return the heads of an input; those of one that is not contiguous lie otherwise than
        projections do.

        In a model, those of the query may come from a rotary embedding, and those of key and value
        from a cache that has room for more. The gradient of the context lies otherwise, too.
        """
        heads = rearrange(
            self._project(x, role), f"b l (h d) -> {self.axes.heads}", d=self.config.width_of(role)
        )
        if self.contiguous:
            return heads.contiguous()
        if x.is_contiguous():
            return heads
        return _laid_out_otherwise(heads) if role == "q" else _with_room(heads, self.axes.heads)

    def _project(self, x: Tensor, role: str) -> Tensor:
        if not self.config.projected:
            return x
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}"))

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        held = [(name, getattr(self, name)) for name in PARAMETERS]
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in held
            if p is not None
        }


def _one_by_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of heads, (B * H, L, d_k) or (B, L, H, d_k), and of as many masks, for a
    kernel of one.
    """

    @wraps(function_of(kernel))
    def attend(*inputs: Any, **options: Any) -> Any:
        query = next(x for x in (*inputs, *options.values()) if isinstance(x, Tensor))

        def one(number: int, given: Any) -> Any:
            return (
                given[number] if isinstance(given, Tensor) and given.ndim == query.ndim else given
            )

        results = []
        for number in range(len(query)):
            own_inputs = [one(number, given) for given in inputs]
            own_options = {name: one(number, given) for name, given in options.items()}
            results.append(kernel(*own_inputs, **own_options))
        return _stacked(results) if results else query  # of no items

    return attend


def _stacked(results: Sequence[Any]) -> Any:
    """Return the results for each head as one."""
    if isinstance(results[0], tuple):
        return tuple(map(_stacked, zip(*results, strict=True)))
    return torch.stack([*results]) if isinstance(results[0], Tensor) else results[0]


def _laid_out_otherwise(heads: Tensor) -> Tensor:
    """Return heads of four axes in another order in memory."""
    if heads.ndim < 4:
        return heads
    return (
        heads.transpose(1, 2).contiguous().transpose(1, 2)
        if heads.is_contiguous()
        else heads.contiguous()
    )


def _with_room(heads: Tensor, axes: str) -> Tensor:
    """Return heads of four axes as a slice of what is longer by one position, of NaN."""
    if heads.ndim < 4:
        return heads
    axis = axes.split().index("l")
    return F.pad(heads, (0, 0) * (3 - axis) + (0, 1), value=torch.nan).narrow(
        axis, 0, heads.shape[axis]
    )


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a configuration, in the order of `Weights`."""
    kv_rows = {role: config.kv_heads * config.width_of(role) for role in "kv"}
    rows = {"q": config.inner_width, **kv_rows, "o": config.output_width}
    columns = {
        "q": config.d_model,
        "k": config.key_width,
        "v": config.value_width,
        "o": config.context_width,
    }
    matrices: dict[str, tuple[int, ...]] = {
        f"w_{role}": (rows[role], columns[role]) for role in rows
    }
    return matrices | {f"b_{role}": (rows[role],) for role in rows if config.has_bias(role)}
