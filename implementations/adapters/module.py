"""`from_module`: judge a `torch.nn.Module` class as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import (
    Call,
    CallByName,
    call_by_name,
    limits,
    read_signature,
)
from mha.implementations.adapters.construction import (
    construct,
    constructor_arguments,
    fixed_dropout,
    module_class,
)
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.adapters.loading import (
    KEYS,
    ParameterPath,
    load,
    projects,
    weight_gradients,
)
from mha.implementations.adapters.mask_forms import MaskedNumber, MaskFormat, PaddingConvention
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.signature import Signature, forward_of
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims, Config, MaskConvention, Options, Output, Weights

Parameters = Mapping[str, ParameterPath] | Callable[[Config], Mapping[str, ParameterPath]]


def _without(image: Tensor, axis: int) -> Tensor:
    """Return an image without an axis of length 1; one that the module has flattened, as it is."""
    return image.squeeze(axis) if image.ndim == 4 else image


# What each does to an input of shape (b, l, d), and to the output, the other way.
TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "b l d": lambda x: x,
    "l b d": lambda x: x.transpose(0, 1),
    "b d l": lambda x: x.transpose(1, 2),
    "b d l 1": lambda x: x.transpose(1, 2).unsqueeze(3),
    "b l 1 d": lambda x: x.unsqueeze(2),
    "b 1 l d": lambda x: x.unsqueeze(1),
}
FROM_LAYOUT = TO_LAYOUT | {
    "b d l 1": lambda x: _without(x, 3).transpose(1, 2),
    "b l 1 d": lambda x: _without(x, 2),
    "b 1 l d": lambda x: _without(x, 1),
}
# The forms of masks that are claimed by default.
MASK_FORMS_OF = {"keep": {"bool"}, "drop": {"bool"}, "additive": {"bool", "float"}}


def from_module(  # noqa: PLR0913  the public options, each by name
    constructor: Callable[..., nn.Module],
    *,
    parameters: Parameters,
    mask: MaskConvention | None = "keep",
    mask_shape: str | None = None,
    mask_numbers: bool = False,
    padding: PaddingConvention | None = None,
    causal_by_default: bool = False,
    mask_required: bool = False,
    masked_number: MaskedNumber = "-inf",
    memory_optional: bool = False,
    query_last: bool | None = None,
    rotation_pairs: bool = False,
    layout: str = "b l d",
    weights: str | int | None = None,
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
) -> ModuleImplementation:
    """Adapt a module class to the contract, without changing it.

    constructor: the class, a function that builds the module, or a `functools.partial` of either.
        Its parameters are recognised by name (`CONSTRUCTOR_NAMES`); a `functools.partial` supplies
        any others. A parameter `config` is given an object of the class of its annotation, with
        these names, or any object that has them all.
    parameters: where the weights go: the keys "w_q", "w_k", "w_v" and "w_o", each with the dotted
        name of a linear layer, of an nn.ModuleList with one layer per head ("heads.*.q" for a layer
        inside each member of a list), or of a parameter; "w_qkv", "w_kv" or "w_qk" for projections
        stacked in that order, "w_kqv" in another; "b_q" and so on for a bias that is not part of a
        layer; "extra_k" and "extra_v" for what `Config.bias_kv` adds; None for a projection that
        the module lacks. Without an entry for W_o, the adapter projects what the module returns. A
        name with an einops pattern, such as ("qkv", "(r h e) d -> (h r e) d"), gives the layout of
        a weight (out, in) in the module: r counts the stacked projections, e the columns of a head,
        and the last axis on the left is that of the inputs. If the names depend on the
        configuration, a function of the `Config` that returns such a map.
    mask: the module's convention for boolean masks: "keep" (True = may attend), "drop" (True = may
        not attend), "additive" (0 or -infinity, added to the scores), or None if it takes no mask.
    mask_shape: the shape of its masks, such as "b s", "b 1 l s" or "(b h) l s", if it does not take
        what is broadcastable to (B, H, L, S); see also `Claims.per_head_mask` and
        `Claims.per_query_mask`. Without s, "b" or "b l", it is the number of the first keys that a
        query may attend to (`Claims.prefix_masks`).
    mask_numbers: whether it takes boolean masks as ones and zeros in the dtype of the query.
    padding: "keep" or "drop" if, beside its mask, it takes one of keys (B, S) under a name of
        padding (`PADDING_NAMES`): keys that no head and no query of an item may attend to go there,
        and the rest of a mask to `mask`. Masks of numbers are not split.
    causal_by_default: whether a call without a mask is causal, and a mask takes the place of that.
        A call that is not causal then gets a mask that allows everything.
    mask_required: whether a call without a mask raises. It gets one that allows everything.
    masked_number: what an additive mask has for a key that is masked: "-inf", or "lowest" for the
        lowest number of its dtype, as callers of transformers' code pass it.
    memory_optional: whether a call without its memory, one input for key and value that has a
        default, is the same self-attention with the same masks. The memory is then left out where
        query, key and value are one tensor.
    query_last: of two inputs, whether the first one is key and value, and the second one the query,
        or the other way round; by default, their names say it.
    rotation_pairs: whether the rotation that a call requires (`freqs_cos` and `freqs_sin`, or
        complex `freqs_cis`) has the shape (L, d_k / 2), as in Llama; by default, cosines and sines
        are of one element, and `freqs_cis` is None.
    layout: the axes of inputs and output in order, "b l d" (batch, length, d_model), "l b d", "b d
        l", or "b d l 1", "b l 1 d" or "b 1 l d" for an image of one column, or of one row.
    weights: the attribute, by its dotted name, on which a call leaves the weights, if it does not
        return them; or their place in what it returns, counted from 0, if they are not the first
        after the output.
    call: calls the module (see `Call`); by default, arguments are passed by the names of the
        parameters of `forward`, and None for those that it requires and that have no known name.
    claims: what the module supports; by default `Claims()`, without what its parameters and masks
        cannot express, and with float masks if `mask` is "additive". If gradients are not claimed,
        the weights are loaded with requires_grad=False.
    name: the name in reports; by default that of the class.

    Raises ImplementationError for a constructor or a `forward` whose parameters are not recognised,
    for arguments that contradict each other, and for claims that no call can express.

    >>> class MyAttention(nn.Module):
    ...     def __init__(self, d_model, n_heads, bias=True):
    ...         super().__init__()
    ...         self.n_heads = n_heads
    ...         self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
    ...         self.out = nn.Linear(d_model, d_model, bias=bias)
    ...     def forward(self, x):
    ...         parts = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
    ...         context = torch.nn.functional.scaled_dot_product_attention(*parts)
    ...         return self.out(context.transpose(1, 2).flatten(2))
    >>> claims = Claims(masks=(), causal=None, cross_attention=False, returns_weights=False)
    >>> implementation = from_module(
    ...     MyAttention, parameters={"w_qkv": "qkv", "w_o": "out"}, mask=None, claims=claims
    ... )
    >>> implementation.name
    'MyAttention'
    >>> config = Config(d_model=6, n_heads=2)
    >>> attention = implementation.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
    >>> x = torch.zeros(5, 3, 6, dtype=torch.float64)
    >>> attention(x, x, x).output.shape
    torch.Size([5, 3, 6])
    """
    named = constructor.func if isinstance(constructor, partial) else constructor
    label = name or str(getattr(named, "__name__", "module"))
    target = _class_of(constructor)
    masks = MaskFormat(
        mask, mask_shape, mask_numbers, padding, causal_by_default, mask_required, masked_number
    )
    own_format = (
        memory_optional or rotation_pairs or query_last is not None or masks != MaskFormat(mask)
    )
    _validate(label, parameters, layout, weights, call, own_format=own_format)
    arguments = constructor_arguments(label, constructor)
    options: dict[str, Any] = {"memory_optional": memory_optional, "query_last": query_last}
    never = claims is not None and not claims.cross_attention
    signature = (
        None
        if call
        else read_signature(label, forward_of(target), masks, self_attention=never, **options)
    )
    claims = _claims(label, claims, masks, signature)
    _require_head_dim(label, claims, arguments)
    place, attribute = (weights, None) if isinstance(weights, int) else (None, weights)
    signature = signature and signature.with_rotations(of_pairs=rotation_pairs)
    call = (
        call if signature is None else call_by_name(label, signature, claims, layout, masks, place)
    )
    assert call
    return ModuleImplementation(
        label, claims, constructor, parameters, arguments, call, layout, attribute
    )


def _class_of(constructor: Callable[..., nn.Module]) -> type[nn.Module]:
    """Return the class that a constructor makes; raises ImplementationError for anything else."""
    target = module_class(constructor)
    if target is None:
        raise ImplementationError(
            "from_module needs a torch.nn.Module class, or a function that makes one, but got"
            f" {constructor!r}"
        )
    return target


def _validate(
    label: str,
    parameters: object,
    layout: str,
    weights: object,
    call: Call | None,
    *,
    own_format: bool,
) -> None:
    """Raise ImplementationError, with the label, for an argument that is not what `from_module`
    takes.

    own_format: whether a format of masks is given, or what a memory is.
    """
    if call is not None and own_format:
        raise ImplementationError(
            f"{label}: call=... is given masks as the contract has them, and makes the call itself,"
            " so mask_shape, mask_numbers, padding, causal_by_default, mask_required,"
            " masked_number, memory_optional, query_last and rotation_pairs have no effect; leave"
            " them out"
        )
    place = (
        isinstance(weights, int) and not isinstance(weights, bool) and weights >= 0 and call is None
    )
    if not (weights is None or isinstance(weights, str) or place):
        raise ImplementationError(
            f"{label}: weights must be the name of an attribute or, without call=, a place from 0,"
            f" but is {weights!r}"
        )
    if not (callable(parameters) or isinstance(parameters, Mapping)):
        raise ImplementationError(
            f"{label}: parameters must map {KEYS} to names in the module, but is {parameters!r:.80}"
        )
    if layout not in TO_LAYOUT:
        raise ImplementationError(
            f"{label}: layout must be {' or '.join(map(repr, TO_LAYOUT))}, but is {layout!r}"
        )


def _claims(
    label: str, claims: Claims | None, masks: MaskFormat, signature: Signature | None
) -> Claims:
    """Return the claims, or the default ones for a format of masks and what calls by name can
    express.
    """
    convention = masks.convention
    if claims is None:
        claims = (
            Claims(masks=MASK_FORMS_OF[convention]) if convention else Claims(masks=(), causal=None)
        )
        return claims if signature is None else replace(claims, **limits(signature, masks, claims))
    for field in ("value_width", "lse"):
        if getattr(claims, field):
            raise ImplementationError(
                f"{label}: claims {field}, which only a kernel can, adapted by from_kernel"
            )
    if convention is None and claims.masks:
        raise ImplementationError(
            f"{label}: mask=None declares that it takes no mask, but claims.masks is"
            f" {sorted(claims.masks)}; claim masks=() or declare the convention"
        )
    return claims


def _require_head_dim(label: str, claims: Claims, arguments: Mapping[str, str]) -> None:
    """Raise ImplementationError if a width of heads is claimed that no parameter of the constructor
    sets.
    """
    if claims.own_head_dim and not {"head_dim", "config"} & set(arguments.values()):
        raise ImplementationError(
            f"{label}: claims own_head_dim, but none of the parameters of its constructor has a"
            f" known name of head_dim ({', '.join(CONSTRUCTOR_NAMES['head_dim'])})"
        )


@dataclass(frozen=True, eq=False)
class ModuleImplementation:
    """A module class as an implementation; made by `from_module`.

    arguments: what each parameter of the constructor is given, a key of `CONSTRUCTOR_NAMES`.
    """

    name: str
    claims: Claims
    constructor: Callable[..., nn.Module]
    parameters: Parameters
    arguments: Mapping[str, str]
    call: Call
    layout: str = "b l d"
    weights: str | None = None

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> ModuleAttention:
        """Construct the module and load the weights.

        Raises what the constructor raises for a configuration that it rejects, and
        ImplementationError for weights that cannot be loaded.
        """
        module = self._constructed(config, dtype, device)
        try:
            parameters = self._paths(config)
            load(self.name, module, parameters, weights, config.head_dim)
        except ImplementationError:
            raise
        except Exception as error:  # the class has accepted the configuration
            raise ImplementationError(
                f"{self.name}: {type(error).__name__} in loading its weights: {error}"
            ) from error
        if not self.claims.gradients:
            module.requires_grad_(False)
        return ModuleAttention(module, self, config, parameters, weights)

    def as_constructed(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> ModuleAttention:
        """Construct the module, and load nothing: its weights are its own, but for a W_o that the
        adapter adds.
        """
        module = self._constructed(config, dtype, device)
        return ModuleAttention(module, self, config, self._paths(config), weights)

    def _constructed(self, config: Config, dtype: torch.dtype, device: str) -> nn.Module:
        module = construct(self.constructor, self.arguments, config, self.claims.dropout, device)
        for layer in () if config.drops else fixed_dropout(module):
            layer.p = 0.0  # the formula in training has none
        return module.to(device=device, dtype=dtype)

    def _paths(self, config: Config) -> Mapping[str, ParameterPath]:
        return self.parameters(config) if callable(self.parameters) else self.parameters


def _projection(weights: Weights, like: Tensor) -> nn.Linear:
    """Return a layer of W_o and b_o, of the dtype, on the device and with the gradients of another
    parameter.
    """
    rows, columns = weights.w_o.shape
    layer = nn.Linear(columns, rows, weights.b_o is not None, device=like.device, dtype=like.dtype)
    layer.load_state_dict(
        {"weight": weights.w_o} | ({} if weights.b_o is None else {"bias": weights.b_o})
    )
    return layer.requires_grad_(like.requires_grad)


class ModuleAttention(nn.Module):
    """A module with its weights; `module` is the object that was constructed, `project` W_o, if the
    adapter adds it.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: ModuleImplementation,
        config: Config,
        parameters: Mapping[str, ParameterPath],
        weights: Weights,
    ) -> None:
        super().__init__()
        self.module, self.adapter, self.config, self.parameter_paths = (
            module,
            adapter,
            config,
            parameters,
        )
        self.call = (
            adapter.call.built_for(config) if isinstance(adapter.call, CallByName) else adapter.call
        )
        self.layout = "b l d" if config.length_first else adapter.layout
        self.rows = {name: len(tensor) for name, tensor in weights.named()}
        self.project = (
            None if projects(parameters) else _projection(weights, next(module.parameters()))
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Call the module with its own conventions; see `mha.spec.Attention`."""
        options = Options(**given)
        if self.layout != "b l d":
            made = {
                id(x): TO_LAYOUT[self.layout](x) for x in (query, key, value)
            }  # one tensor stays one tensor
            query, key, value = (made[id(x)] for x in (query, key, value))
        returned = self.call(self.module, query, key, value, **options.arguments)
        output, weights, _ = as_output(returned, query.shape)
        if self.layout != "b l d" and isinstance(output, Tensor):
            output = FROM_LAYOUT[self.layout](output)
        output = output if self.project is None else self.project(output)
        if self.adapter.weights and options.need_weights:
            weights = attrgetter(self.adapter.weights)(self.module)
        return Output(output, weights)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        """Call the module's own `decode`; see `mha.spec.Decoder`."""
        decode: Any = self.module.decode
        return decode(query, key, value, *rest, **named)

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """Call the module's own `reorder_cache`; see `mha.spec.CacheEditor`."""
        reorder: Any = self.module.reorder_cache
        return reorder(cache, items)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """Call the module's own `crop_cache`; see `mha.spec.CacheEditor`."""
        crop: Any = self.module.crop_cache
        return crop(cache, length)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        gradients = weight_gradients(
            self.module, self.parameter_paths, self.rows, self.config.head_dim
        )
        if self.project is not None:
            added = {
                f"{name[0]}_o": parameter for name, parameter in self.project.named_parameters()
            }
            gradients |= {
                name: x.new_zeros(x.shape) if x.grad is None else x.grad.clone()
                for name, x in added.items()
            }
        absent = {name: rows for name, rows in self.rows.items() if name not in gradients}
        config = self.config
        width = {"w_k": config.key_width, "w_v": config.value_width, "w_o": config.inner_width}
        for name, rows in absent.items():  # of a projection that the module does not have
            shape = (rows, width.get(name, config.d_model)) if name.startswith("w") else (rows,)
            gradients[name] = next(self.module.parameters()).new_zeros(shape)
        return gradients
