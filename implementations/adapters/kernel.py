"""`from_kernel`: judge a function that computes softmax(q k^T / sqrt(d_k) + mask) v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from einops import EinopsError, rearrange
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mha.implementations.adapters.calling import Call, CallByName, call_by_name, versions_of
from mha.implementations.adapters.converted import converted
from mha.implementations.adapters.gradients import gradient_of
from mha.implementations.adapters.kernel_axes import TOKENS, KernelAxes, function_of
from mha.implementations.adapters.mask_forms import MaskFormat
from mha.implementations.adapters.options import (
    FIELDS_OF_MASKS,
    MaskOptions,
    mask_format,
    require_known,
)
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.packing import Packer
from mha.implementations.adapters.reading import read_parameters, read_signature
from mha.implementations.adapters.signature import Signature
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims, Config, Options, Output, Packed, Weights, validate_call

PARAMETERS = tuple(f"{kind}_{role}" for kind in "wb" for role in "qkvo")


def from_kernel(  # noqa: PLR0913  the public options, each by name
    kernel: Callable[..., Any],
    *,
    layout: str = "b h l d",
    masks: MaskFormat | None = None,
    contiguous: bool = False,
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
    **options: Unpack[MaskOptions],
) -> KernelImplementation:
    """Adapt a kernel, which is judged on query, key and value themselves, without projections.

    kernel: called with query (B, H, L, d_k), key and value (B, H_kv, S, d_k), in `layout`. It
        scales the scores by 1/sqrt(d_k) itself, and returns the context in the layout of the query,
        or the context and the weights (B, H, L, S). It must take heads however they lie in memory,
        unless `contiguous`: those of a query that is not contiguous lie otherwise than those of the
        key. H_kv is H, unless `Claims.grouped_query` is claimed, or 1 with `Claims.multi_query`.
    layout: the axes in order: b (batch), h (heads), l (length) and d (head_dim), separated by
        spaces; or one of
        "(b h) l d", "b l (h d)": the heads are in the batch, or the kernel splits them itself;
        "l d", "l h d": it takes one head, or one item, and is called for each;
        "h d": it takes one query, with keys "l h d", and is called for each, in causal calls with
            the keys up to its own place, as in decoding;
        "b h d, b l h d", "b h d, b h l d": it takes one query of each item, with these axes of
            keys and values, and lengths of the items if it has them;
        "t h d": it takes a row of tokens, the items of the batch one after another, and their
            offsets.
        An axis 3, as in "b l 3 h d", says that query, key and value are one tensor, and an axis 2
        that key and value are. If the context has other axes, they follow: "b h l d -> b l (h d)".
    masks: the masks that it takes; by default boolean ones, True = may attend.
    contiguous: whether it is given only contiguous heads, and contiguous gradients of its context,
        since it raises for others.
    call: calls the kernel (see `Call`); by default, arguments are passed by the names of its
        parameters.
    claims: what the kernel supports; by default, as for `from_module`, and no weights.
    name: the name in reports; by default that of the function.
    options: what `masks` says, one by one, as for `from_module`.

    Raises ImplementationError for an invalid layout, a signature that is not recognised, and claims
    of extras.

    >>> def attend(q, k, v):
    ...     return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
    >>> implementation = from_kernel(attend, mask=None)
    >>> config = Config(d_model=6, n_heads=2)
    >>> weights = Weights.random(config, 0)
    >>> attention = implementation.build(config, weights, dtype=torch.float64, device="cpu")
    >>> query = torch.zeros(5, 3, 6, dtype=torch.float64)
    >>> memory = torch.zeros(5, 7, 6, dtype=torch.float64)
    >>> attention(query, memory, memory).output.shape
    torch.Size([5, 3, 6])
    """
    label = name or str(getattr(kernel, "__name__", "kernel"))
    require_known("from_kernel", options, FIELDS_OF_MASKS)
    axes = KernelAxes.read(label, layout)
    masks = mask_format(label, masks, options)
    if claims is None:
        claims = Claims(returns_weights=False)
        if not masks.convention:
            claims = replace(claims, masks=(), causal=None)
    if claims.extras:
        raise ImplementationError(
            f"{label}: claims has the extras {sorted(claims.extras)}, but the projections around a"
            " kernel have none; adapt a module instead"
        )
    if call is None:
        signature = _signature(label, kernel, axes, masks, claims)
        claims = _with_packing(label, axes, masks, claims)
        by_name = call_by_name(label, signature, claims, axes.heads, masks)
        call = replace(by_name, same_shape=axes.context == axes.heads)
    elif masks != MaskFormat(masks.convention):
        raise ImplementationError(
            f"{label}: call=... is given masks as the contract has them, so mask_shape,"
            " mask_numbers, mask_required, masked_number, mask_attribute, beside,"
            " causal_by_default and causal_word have no effect; leave them out"
        )
    elif axes.of_tokens:
        raise ImplementationError(f"{label}: call=... is given a batch, but layout is {layout!r}")
    claims = replace(claims, projections=False, weight_gradients=False)
    return KernelImplementation(label, claims, kernel, layout, call, contiguous)


def _signature(
    label: str, kernel: Callable[..., Any], axes: KernelAxes, masks: MaskFormat, claims: Claims
) -> Signature:
    """Return what the parameters of a kernel mean; raises ImplementationError as `from_kernel`."""
    parameters = axes.parameters_of(read_parameters(label, function_of(kernel)))
    signature = axes.with_heads(kernel, read_signature(label, parameters, masks))
    return signature.with_lengths(parameters) if claims.lengths else signature


def _with_packing(label: str, axes: KernelAxes, masks: MaskFormat, claims: Claims) -> Claims:
    """Return the claims of a kernel, with that of packed sequences if it takes a row of tokens.

    Raises ImplementationError for claims that such a kernel, or another one, cannot have.
    """
    if not axes.of_tokens:
        if claims.packed is not None:
            raise ImplementationError(
                f"{label}: claims packed, which the layout {TOKENS!r} says of a kernel"
            )
        return claims
    if masks.convention or claims.lengths:
        raise ImplementationError(
            f"{label}: it takes a row of tokens, which has no masks, and whose lengths are offsets;"
            " declare mask=None, and claim no lengths"
        )
    return replace(claims, packed=claims.packed or Packed())


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
            converted(self.kernel, dtype, device)
        module = KernelAttention(self, config, weights.to(dtype, device))
        return module if self.claims.gradients else module.requires_grad_(False)


class KernelAttention(nn.Module):
    """Multi-head attention around a kernel."""

    def __init__(self, adapter: KernelImplementation, config: Config, weights: Weights) -> None:
        super().__init__()
        self.config = config
        self.axes = KernelAxes.read(adapter.name, adapter.layout)
        self.adapter_name = adapter.name
        self.kernel = adapter.kernel
        self.contiguous = adapter.contiguous
        self.claims = adapter.claims
        self.call = adapter.call
        if isinstance(adapter.call, CallByName):
            self.call = adapter.call.built_for(config)
        for name in PARAMETERS:
            given = getattr(weights, name)
            held = None
            if given is not None and config.projected:
                copied = given.detach().clone(memory_format=torch.contiguous_format)
                held = nn.Parameter(copied)
            self.register_parameter(name, held)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Project, call the kernel, and project back; see `mha.spec.Attention`."""
        options = Options(**given)
        validate_call(self.config, query, key, value, options.mask, masks=self.claims.masks)
        inputs = (query, key, value)
        heads = [self._heads(x, role) for x, role in zip(inputs, "qkv", strict=True)]
        versions = versions_of(heads)
        shape = heads[0].shape if self.axes.context == self.axes.heads else None
        kernel = self.kernel
        if self.axes.of_tokens:
            packer = Packer.read(self.adapter_name, function_of(kernel), self.claims)
            kernel = packer.of(kernel, options)
            options = options.change(key_lengths=None, query_lengths=None, packing=None)
        elif self.axes.one_query and not options.is_causal and _counts_places(options):
            # Kernels refuse so that take windows in causal calls only.
            raise NotImplementedError(
                f"{self.adapter_name} takes one query, at the place of the last key: windows,"
                " chunks and slopes are of causal calls"
            )
        elif not self.axes.takes_all_heads:
            kernel = self.axes.unpacked(kernel)
        returned = self.call(kernel, *heads, **options.arguments)
        context, weights, lse = as_output(returned, shape, lse=self.claims.lse)
        for x, before, after in zip(inputs, versions, versions_of(heads), strict=True):
            if before != after:
                increment_version(x)  # since a caller's heads would be changed
        joined = self._joined(context, query)
        return Output(self._project(joined, "o"), weights, self._lse(lse, query.shape[0]))

    def _joined(self, context: Tensor, query: Tensor) -> Tensor:
        """Return the context as (B, L, H d_v); its gradient lies in memory as `_heads` says.

        Raises ValueError for a context of other axes.
        """
        try:
            if context.requires_grad and self.contiguous:
                context.register_hook(torch.Tensor.contiguous)
            elif context.requires_grad and not (
                query.is_contiguous() or torch.compiler.is_compiling()
            ):
                context.register_hook(_laid_out_otherwise)
            return rearrange(context, f"{self.axes.context} -> b l (h d)", h=self.config.n_heads)
        except EinopsError:
            raise ValueError(
                f"its context has the shape {tuple(context.shape)}, not {self.axes.context!r}"
            ) from None

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
        """Return the heads of an input; of one that is not contiguous, they lie as in a model.

        There, those of the query may come from a rotary embedding, and those of key and value from
        a cache that has room for more. The gradient of the context lies otherwise, too.
        """
        pattern = f"b l (h d) -> {self.axes.heads}"
        heads = rearrange(self._project(x, role), pattern, d=self.config.width_of(role))
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
        gradients = {}
        for name in PARAMETERS:
            held = getattr(self, name)
            if held is not None:
                gradients[name] = gradient_of(held)
        return gradients


def _counts_places(options: Options) -> bool:
    """Return whether a call has an option of places."""
    by_place = (options.window, options.chunk, options.alibi)
    return any(given is not None for given in by_place)


def _laid_out_otherwise(heads: Tensor) -> Tensor:
    """Return heads of four axes in another order in memory."""
    if heads.ndim < 4:
        return heads
    if not heads.is_contiguous():
        return heads.contiguous()
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _with_room(heads: Tensor, axes: str) -> Tensor:
    """Return heads of four axes as a slice of what is longer by one position, of NaN."""
    if heads.ndim < 4:
        return heads
    axis = axes.split().index("l")
    unchanged_axes_after = (0, 0) * (3 - axis)
    longer = F.pad(heads, (*unchanged_axes_after, 0, 1), value=torch.nan)
    return longer.narrow(axis, 0, heads.shape[axis])


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a configuration, in the order of `Weights`."""
    rows = {
        "q": config.inner_width,
        "k": config.kv_heads * config.width_of("k"),
        "v": config.kv_heads * config.width_of("v"),
        "o": config.output_width,
    }
    columns = {
        "q": config.d_model,
        "k": config.key_width,
        "v": config.value_width,
        "o": config.context_width,
    }
    shapes: dict[str, tuple[int, ...]] = {f"w_{role}": (rows[role], columns[role]) for role in rows}
    for role in rows:
        if config.has_bias(role):
            shapes[f"b_{role}"] = (rows[role],)
    return shapes
