"""What is declared about a class or a kernel: the arguments of its adapter, and its claims."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from mha.implementations.adapters.built_options import SINKS, built_names
from mha.implementations.adapters.called import call_parameters, forward_of
from mha.implementations.adapters.construction import module_class, parameters_of
from mha.implementations.adapters.kernel import KernelImplementation, from_kernel
from mha.implementations.adapters.kernel_axes import KernelAxes, function_of
from mha.implementations.adapters.mask_forms import MaskedNumber, MaskFormat, PaddingConvention
from mha.implementations.adapters.module import ModuleImplementation, from_module
from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.adapters.neutral import Neutral
from mha.implementations.adapters.score_arguments import has_number_for_none
from mha.implementations.adapters.signature import Signature, signature_of
from mha.implementations.inference.declaration import (
    code_of_declaration,
    default_of,
    line_of_declaration,
)
from mha.implementations.inference.projections import ParameterMap
from mha.spec import Claims, MaskConvention
from mha.spec.claims import Alignment


@dataclass(frozen=True)
class Declared:
    """What `from_module` is given for a class, or a `functools.partial` of one.

    label: the name in reports.
    causal_by_default: how the causal mask is aligned that a call without a mask has, and whose
        place a mask takes.
    claims: those that differ from `Claims()`, added as they are found.
    sinks: the name of the parameter that holds the sinks of the heads.
    The other fields are arguments of `from_module`.
    """

    constructor: Callable[..., nn.Module]
    label: str
    parameters: ParameterMap = field(default_factory=dict)
    sinks: str | None = None
    mask: MaskConvention | None = None
    mask_shape: str | None = None
    mask_numbers: bool = False
    mask_required: bool = False
    masked_number: MaskedNumber = "-inf"
    mask_attribute: str | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    memory_optional: bool = False
    query_last: bool | None = None
    rotation_pairs: bool = False
    rotation_layout: str | None = None
    padding: PaddingConvention | None = None
    causal_by_default: Alignment | None = None
    causal_word: str | None = None
    layout: str = "b l d"
    weights: str | int | None = None
    weights_layout: str | None = None
    neutral: Neutral = field(default_factory=dict)
    residual: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)

    ADAPTER: ClassVar[str] = "from_module"
    # Always written, then those that are written where they are not the default, in this order.
    REQUIRED: ClassVar[tuple[str, ...]] = ("parameters", "mask")
    OPTIONAL: ClassVar[tuple[str, ...]] = (
        "mask_shape",
        "mask_numbers",
        "mask_required",
        "masked_number",
        "mask_attribute",
        "beside",
        "memory_optional",
        "query_last",
        "rotation_pairs",
        "rotation_layout",
        "padding",
        "causal_by_default",
        "causal_word",
        "layout",
        "weights",
        "weights_layout",
        "neutral",
        "residual",
        "arguments",
        "cache",
    )

    def options(self) -> dict[str, Any]:
        """Return the arguments of the adapter, except the claims."""
        given = {name: getattr(self, name) for name in self.REQUIRED}
        if self.sinks is not None:
            given["parameters"] = {**self.parameters, SINKS: self.sinks}
        defaults = {each.name: default_of(each) for each in fields(self)}
        for name in self.OPTIONAL:
            if getattr(self, name) != defaults[name]:
                given[name] = getattr(self, name)
        if "causal_by_default" in given:  # the adapter is not given the alignment
            given["causal_by_default"] = True
        if not self.mask:
            given.pop("causal_by_default", None)
        return given

    def implementation(self) -> ModuleImplementation | KernelImplementation:
        """Return what the adapter makes of it."""
        claims = Claims(**{**self._limits_of_masks, **self.claims})
        return from_module(self.constructor, **self.options(), claims=claims, name=self.label)

    @property
    def _limits_of_masks(self) -> dict[str, Any]:
        """The claims that its masks cannot express, where they are not among its claims yet.

        Where a mask is required, a format is tried before its claims are known.
        """
        if self.mask_required or not self.mask:
            return self.masks.limits(Claims())
        return {}

    def code(self, constructor: str, **more: Any) -> str:
        """Return the code that declares the same, ready to paste below the class.

        constructor: its code.
        more: further arguments of the adapter.
        """
        options = self.options() | more
        return code_of_declaration(constructor, options, self.claims, self.ADAPTER)

    def line(self, constructor: str) -> str:
        """Return the code of `code` in one line."""
        return line_of_declaration(constructor, self.options(), self.claims, self.ADAPTER)

    def claimed(self, name: str) -> Any:
        """Return a claim, or its default."""
        return self.claims.get(name, getattr(Claims(), name))

    @property
    def masks(self) -> MaskFormat:
        """The format of its masks."""
        return MaskFormat(
            convention=self.mask,
            shape=self.mask_shape,
            numbers=self.mask_numbers,
            padding=self.padding,
            causal_by_default=bool(self.causal_by_default and self.mask),
            causal_word=self.causal_word,
            required=self.mask_required,
            masked_number=self.masked_number,
            attribute=self.mask_attribute,
            beside=self.beside,
        )

    @property
    def built_class(self) -> type:
        """The class of the module that is called."""
        cls = module_class(self.constructor)
        assert cls is not None
        return cls

    @property
    def constructor_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of what is called to build a module."""
        return parameters_of(self.constructor)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters that a `functools.partial` sets, each with its value."""
        return getattr(self.constructor, "keywords", {})

    def built_with(self, name: str, value: object) -> Declared:
        """Return the same with a parameter of the constructor set."""
        return replace(self, constructor=partial(self.constructor, **{name: value}))

    @property
    def cross_attention(self) -> bool | Literal["memory"]:
        """What its inputs may be, as in `Claims`."""
        claimed: bool | Literal["memory"] = self.claimed("cross_attention")
        return claimed

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of a call."""
        return call_parameters(forward_of(self.built_class))

    @property
    def signature(self) -> Signature:
        """What the parameters of a call mean."""
        return self.signature_with(padding=self.padding is not None)

    def signature_with(self, *, padding: bool) -> Signature:
        """Return what they mean if one mask is of key padding, or if none is."""
        found = signature_of(
            self.forward_parameters,
            padding=padding,
            query_last=self.query_last,
            self_attention=not self.cross_attention,
        )
        return found.with_rotations(of_pairs=self.rotation_pairs, layout=self.rotation_layout)

    def names_of(self, option: str) -> tuple[str, ...]:
        """Return the names of an argument about the scores, of a call or of the constructor."""
        if option == SINKS and self.sinks is not None:
            return (self.sinks,)
        named = self.signature.scores | built_names(self.constructor, self.signature)
        return named.get(option, ())

    def takes_in_calls(self, option: str) -> bool:
        """Return whether a call has an argument for an option about the scores."""
        return option in self.signature.scores

    @property
    def unknown_inputs(self) -> list[str]:
        """The parameters that each call requires, and is given None for, whatever that means."""
        known = {*NEUTRAL_MEANING, *self.signature.lengths}
        for option, names in self.signature.scores.items():
            known.update(name for name in names if self._is_known(option, name))
        return [name for name in self.signature.others if name not in known]

    def _is_known(self, option: str, name: str) -> bool:
        """Return whether an argument about the scores is claimed, or has a number for none."""
        scores, lse = self.claimed("scores"), self.claimed("lse")
        claims = {"alibi_switch": scores.alibi, "return_lse": lse}
        is_claimed = bool(claims.get(option, getattr(scores, option, None)))
        return is_claimed or has_number_for_none(option, name)

    @property
    def may_leave_out_memory(self) -> bool:
        """Whether its calls are given a memory, and could be made without one."""
        return self.cross_attention == "memory" and self.signature.has_optional_memory

    @property
    def mask_without_memory(self) -> str | None:
        """The name of its mask in calls without a memory, if such are made."""
        if not self.memory_optional:
            return None
        has_padding = self.padding is not None
        return signature_of(self.forward_parameters, padding=has_padding, self_attention=True).mask


@dataclass(frozen=True)
class DeclaredKernel(Declared):
    """What `from_kernel` is given for a kernel.

    constructor: the kernel itself.
    contiguous: as for `from_kernel`.
    made: how the kernel is made, if it is a module.
    """

    layout: str = "b h l d"
    contiguous: bool = False
    made: Callable[..., nn.Module] | None = None

    ADAPTER: ClassVar[str] = "from_kernel"
    REQUIRED: ClassVar[tuple[str, ...]] = ("mask",)
    OPTIONAL: ClassVar[tuple[str, ...]] = (
        "mask_shape",
        "mask_numbers",
        "mask_required",
        "masked_number",
        "mask_attribute",
        "beside",
        "padding",
        "causal_by_default",
        "causal_word",
        "layout",
        "contiguous",
    )

    def implementation(self) -> KernelImplementation:
        """Return what the adapter makes of it."""
        claims = Claims(**{**self._limits_of_masks, **self.claims})
        return from_kernel(self.constructor, **self.options(), claims=claims, name=self.label)

    @property
    def built_class(self) -> type:
        """The class of the kernel, or of functions."""
        return type(self.constructor)

    @property
    def constructor_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of what makes the kernel, if it is a module."""
        return inspect.signature(self.made).parameters if self.made else {}

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters that are set to make the kernel; by us, those of dropout."""
        return getattr(self.made, "keywords", {})

    def built_with(self, name: str, value: object) -> DeclaredKernel:
        """Return the same for a kernel that is made with a parameter set."""
        assert self.made
        made = partial(self.made, **{name: value})
        return replace(self, constructor=made(), made=made)

    @property
    def axes(self) -> KernelAxes:
        """The axes of its inputs and of its context."""
        return KernelAxes.read(self.label, self.layout)

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the kernel, with query, key and value even where two are one tensor."""
        return self.axes.parameters_of(call_parameters(function_of(self.constructor)))

    def names_of(self, option: str) -> tuple[str, ...]:
        """Return the names of an argument about the scores, of a call."""
        return self.signature.scores.get(option, ())

    def signature_with(self, *, padding: bool) -> Signature:
        """Return what they mean if one mask is of key padding, or if none is."""
        found = self.axes.with_heads(self.constructor, super().signature_with(padding=padding))
        if self.claimed("lengths"):
            return found.with_lengths(self.forward_parameters)
        return found
