"""`from_module`: judge a `torch.nn.Module` class as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from mha.implementations.adapters.axes_of_inputs import FROM_LAYOUT, laid_out
from mha.implementations.adapters.built_options import (
    SINKS,
    BuiltOptions,
    built_options,
    without_sinks,
)
from mha.implementations.adapters.caches import CacheForm, Inputs, inputs_of
from mha.implementations.adapters.calling import Call, CallByName, call_by_name
from mha.implementations.adapters.construction import (
    LARGE,
    Room,
    construct,
    constructor_arguments,
    fixed_dropout,
    module_class,
)
from mha.implementations.adapters.constructor_names import without_partial
from mha.implementations.adapters.converted import converted
from mha.implementations.adapters.given_configs import with_options
from mha.implementations.adapters.gradients import gradient_of, weight_gradients, zero_gradients
from mha.implementations.adapters.kept_caches import cache_of
from mha.implementations.adapters.loading import (
    ParameterPath,
    load,
    output_projection,
    projects,
)
from mha.implementations.adapters.mask_forms import MaskFormat
from mha.implementations.adapters.module_claims import module_claims, require_head_dim
from mha.implementations.adapters.neutral import LEFT_OUT, LeftOut
from mha.implementations.adapters.options import (
    FIELDS_OF_INPUTS,
    FIELDS_OF_MASKS,
    OTHERS,
    InputFormat,
    ModuleOptions,
    input_format,
    mask_format,
    require_default_forms,
    require_known,
    require_parameters_and_layout,
    require_weights,
)
from mha.implementations.adapters.outputs import as_output, per_head
from mha.implementations.adapters.reading import signature_of_class
from mha.implementations.adapters.tables import require_tables
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims, Config, Options, Output, Weights

Parameters = Mapping[str, ParameterPath] | Callable[[Config], Mapping[str, ParameterPath]]


def from_module(  # noqa: PLR0913  the public options, each by name
    constructor: Callable[..., nn.Module],
    *,
    parameters: Parameters,
    masks: MaskFormat | None = None,
    inputs: InputFormat | None = None,
    weights: str | int | None = None,
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
    **options: Unpack[ModuleOptions],
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
        layer; "extra_k" and "extra_v" for what `Config.bias_kv` adds; "sinks" for the
        parameter of `Scores.sinks`; None for a projection that
        the module lacks. Without an entry for W_o, the adapter projects what the module returns. A
        name with an einops pattern, such as ("qkv", "(r h e) d -> (h r e) d"), gives the layout of
        a weight (out, in) in the module: r counts the stacked projections, e the columns of a head,
        and the last axis on the left is that of the inputs. If the names depend on the
        configuration, a function of the `Config` that returns such a map.
    masks: the masks that it takes; by default boolean ones, True = may attend.
    inputs: how it takes query, key and value; by default, each as (batch, length, d_model).
    weights: the dotted name of the attribute on which a call leaves weights that it does not
        return; or their place in what it returns, from 0, if not the first after the output.
    call: calls the module (see `Call`); by default, arguments are passed by the names of the
        parameters of `forward`, and None for those that it requires and that have no known name.
    claims: what the module supports; by default `Claims()`, without what its parameters and masks
        cannot express, and with float masks if these are added. What `Claims.scores` has, and a
        call has no parameter for, is given to the constructor. If gradients are not claimed, the
        weights are loaded with requires_grad=False.
    name: the name in reports; by default that of the class.
    options: what `masks` and `inputs` say, one by one: `mask`, which is `MaskFormat.convention`,
        `mask_shape`, `mask_numbers`, and the other fields by their names; what is to be left out,
        `neutral` and `residual`, see `LeftOut`; `arguments`, the meaning of parameters of the
        constructor whose name says another one, {"bias": "qk_bias"} where an argument bias is for
        query and key only; `weights_layout`, the axes of weights other than (B, H, L, S), as
        "b l s h"; and `cache`, for a class without a method `decode`, the parameter of a call that
        is given a cache, or the attribute that holds one (`mha.implementations.adapters.caches`).

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
    >>> weights = Weights.random(config, 0)
    >>> attention = implementation.build(config, weights, dtype=torch.float64, device="cpu")
    >>> x = torch.zeros(5, 3, 6, dtype=torch.float64)
    >>> attention(x, x, x).output.shape
    torch.Size([5, 3, 6])
    """
    label = name or str(getattr(without_partial(constructor), "__name__", "module"))
    require_known("from_module", options, FIELDS_OF_MASKS, FIELDS_OF_INPUTS, LEFT_OUT, OTHERS)
    target = _class_of(constructor)
    masks = mask_format(label, masks, options)
    inputs = input_format(label, inputs, options)
    if call is not None:
        require_default_forms(label, masks, inputs)
    require_weights(label, weights, has_call=call is not None)
    attribute, place = (weights, None) if isinstance(weights, str) else (None, weights)
    require_parameters_and_layout(label, parameters, inputs.layout)
    arguments = {**constructor_arguments(label, constructor), **options.get("arguments", {})}
    signature = None
    if call is None:
        never_crosses = claims is not None and not claims.cross_attention
        signature = signature_of_class(label, target, masks, inputs, never_crosses=never_crosses)
    claims = module_claims(label, claims, masks, signature)
    if signature is not None:
        call = call_by_name(label, signature, claims, inputs.layout, masks, place)
    assert call is not None
    require_head_dim(label, claims, arguments)
    names = None if signature is None else signature.tables
    require_tables(label, claims.rotary, names, inputs.rotation_layout)
    made = ModuleImplementation(
        label, claims, constructor, parameters, arguments, call, inputs.layout, attribute
    )
    form = cache_of(target, options.get("cache"))
    axes = options.get("weights_layout")
    return replace(made, left_out=LeftOut.of(options), cache=form, weights_layout=axes)


def _class_of(constructor: Callable[..., nn.Module]) -> type[nn.Module]:
    """Return the class that a constructor makes; raises ImplementationError for anything else."""
    target = module_class(constructor)
    if target is None:
        raise ImplementationError(
            "from_module needs a torch.nn.Module class, or a function that makes one, but got"
            f" {constructor!r}"
        )
    return target


@dataclass(frozen=True, eq=False)
class ModuleImplementation:
    """A module class as an implementation; made by `from_module`.

    arguments: what each parameter of the constructor is given, a key of `CONSTRUCTOR_NAMES`.
    room: the longest input and the largest batch that a module is built for, if it asks for these.
    noted: gets the arguments of each call of the constructor.
    left_out: what is left out of it.
    cache: with which it decodes, if it has no method `decode`.
    weights_layout: the axes of the weights that it returns.
    """

    name: str
    claims: Claims
    constructor: Callable[..., nn.Module]
    parameters: Parameters
    arguments: Mapping[str, str]
    call: Call
    layout: str = "b l d"
    weights: str | None = None
    room: Room = LARGE
    noted: list[Mapping[str, Any]] | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    cache: CacheForm | None = None
    weights_layout: str | None = None

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
            without_sinks(module, self._every_path(config).get(SINKS))
        except ImplementationError:
            raise
        except Exception as error:  # the class has accepted the configuration
            raise ImplementationError(
                f"{self.name}: {type(error).__name__} in loading its weights: {error}"
            ) from error
        if not self.claims.gradients:
            module.requires_grad_(False)
        built = self.built_options(config, dtype, device)
        return ModuleAttention(module, self, config, parameters, weights, built)

    def as_constructed(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> ModuleAttention:
        """Construct the module with its own weights; only a W_o that the adapter adds is loaded."""
        module = self._constructed(config, dtype, device)
        return ModuleAttention(module, self, config, self._paths(config), weights)

    def _constructed(self, config: Config, dtype: torch.dtype, device: str) -> nn.Module:
        module = construct(
            self.constructor,
            self.arguments,
            config,
            self.claims.dropout,
            device,
            room=self.room,
            noted=self.noted,
        )
        self.left_out.replace_parts(self.name, module)
        if not config.drops:
            for layer in fixed_dropout(module):
                layer.p = 0.0  # the formula in training has none
        return converted(module, dtype, device)

    def _paths(self, config: Config) -> dict[str, ParameterPath]:
        """Return where the weights go."""
        return {name: path for name, path in self._every_path(config).items() if name != SINKS}

    def _every_path(self, config: Config) -> Mapping[str, ParameterPath]:
        return self.parameters(config) if callable(self.parameters) else self.parameters

    def built_options(self, config: Config, dtype: torch.dtype, device: str) -> BuiltOptions | None:
        """Return what calls may say, and a module is built with; None where that is nothing."""
        path, signature = self._every_path(config).get(SINKS), None
        if isinstance(self.call, CallByName):
            signature = self.call.signature
        build = partial(self._built_with, config, dtype, device)
        return built_options(self.name, self.constructor, signature, self.claims, path, build)

    def _built_with(
        self, config: Config, dtype: torch.dtype, device: str, arguments: Mapping[str, Any]
    ) -> nn.Module:
        constructor = with_options(self.constructor, arguments)
        return replace(self, constructor=constructor)._constructed(config, dtype, device)


class ModuleAttention(nn.Module):
    """A module with its weights.

    module: the object that was constructed.
    built_options: what calls say about scores, for which others are constructed.
    project: W_o, if the adapter adds it.
    decoding: what decoding calls say about scores; see `decoder_with`.
    """

    decoding = Options()

    def __init__(
        self,
        module: nn.Module,
        adapter: ModuleImplementation,
        config: Config,
        parameters: Mapping[str, ParameterPath],
        weights: Weights,
        built_options: BuiltOptions | None = None,
    ) -> None:
        super().__init__()
        self.module, self.adapter, self.config = module, adapter, config
        self.parameter_paths = parameters
        self.call = adapter.call
        if isinstance(adapter.call, CallByName):
            self.call = adapter.call.built_for(config)
        self.built_options = built_options
        self.layout = "b l d" if config.length_first else adapter.layout
        self.rows = {name: len(tensor) for name, tensor in weights.named()}
        self.project = None
        if not projects(parameters):
            self.project = output_projection(weights, next(module.parameters()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Call the module with its own conventions; see `mha.spec.Attention`."""
        options = Options(**given)
        if self.layout != "b l d":
            query, key, value = laid_out(self.layout, query, key, value)
        called, options = self._built_for(options, query)
        returned = self._called(called, query, key, value, options)
        output, weights = self._projected(as_output(returned, query.shape))
        if self.adapter.weights and options.need_weights:
            weights = attrgetter(self.adapter.weights)(called)
        layout, n_heads = self.adapter.weights_layout, self.config.n_heads
        return Output(output, per_head(weights, layout, n_heads))

    def _projected(self, returned: Output) -> tuple[Any, Any]:
        """Return output and weights, the output with the axes and the W_o of the contract."""
        output, weights, _ = returned
        if self.layout != "b l d" and isinstance(output, Tensor):
            output = FROM_LAYOUT[self.layout](output)
        if self.project is not None:
            output = self.project(output)
        return output, weights

    def _built_for(self, options: Options, query: Tensor) -> tuple[nn.Module, Options]:
        """Return the module that a call is of, and the options that are left for the call."""
        if self.built_options is None:
            return self.module, options
        return self.built_options.module_for(self.module, options, query)

    def _called(
        self, called: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Any:
        """Return what a module returns, without what is to be left out."""
        target: Callable[..., Any] = called
        if self.built_options is not None:
            target, options = self.built_options.with_sinks(called, options)
        left_out = self.adapter.left_out
        if left_out == LeftOut():
            return self.call(target, query, key, value, **options.arguments)
        with left_out.during_calls(self.module, query):
            return self.call(target, query, key, value, **options.arguments)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        """Call the module's own `decode`, or the module with its cache; see `mha.spec.Decoder`."""
        called, _ = self._built_for(self.decoding, query)
        if self.adapter.cache is not None:
            inputs = inputs_of(self.adapter.claims, query, key, value)
            return self._decoded(called, self.adapter.cache, inputs, *rest, **named)
        return cast(Any, called).decode(query, key, value, *rest, **named)

    def decoder_with(self, options: Options) -> ModuleAttention | None:
        """Return one that decodes with these options; None if no module is built with them."""
        if self._built_for(options, next(self.module.parameters()))[1].of_scores:
            return None
        other = copy(self)
        other.decoding = options.change(mask=None, is_causal=False)
        return other

    def _decoded(
        self, called: nn.Module, form: CacheForm, inputs: Inputs, cache: Any = None
    ) -> tuple[Any, Any]:
        """Call a module at the next positions with its cache."""
        call = cast(CallByName, self.call)
        if self.layout != "b l d":
            inputs = laid_out(self.layout, *inputs)
        if cache is None:
            cache = form.made(call, called, inputs[0])
        with self.adapter.left_out.during_calls(called, inputs[0]):
            returned, cache = form.called(call, called, inputs, cache)
        return self._projected(returned)[0], cache

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """Call the module's own `reorder_cache`; see `mha.spec.CacheEditor`."""
        if self.adapter.cache is not None:
            return self.adapter.cache.reordered(cache, items)
        return cast(Any, self.module).reorder_cache(cache, items)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """Call the module's own `crop_cache`; see `mha.spec.CacheEditor`."""
        if self.adapter.cache is not None:
            return self.adapter.cache.cropped(cache, length)
        return cast(Any, self.module).crop_cache(cache, length)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        rows, width = self.rows, self.config.head_dim
        gradients = weight_gradients(self.module, self.parameter_paths, rows, width)
        if self.project is not None:
            for name, held in self.project.named_parameters():
                gradients[f"{name[0]}_o"] = gradient_of(held)
        return zero_gradients(rows, self.config, next(self.module.parameters())) | gradients
