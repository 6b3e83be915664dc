"""One way to understand a module class, for trial runs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import Call, CallByName
from mha.implementations.adapters.compiled import compiled_again
from mha.implementations.adapters.construction import SHORT, Room, module_class, parameters_of
from mha.implementations.adapters.mask_forms import MaskedNumber, MaskFormat, PaddingConvention
from mha.implementations.adapters.module import ModuleImplementation, from_module
from mha.implementations.adapters.signature import (
    Signature,
    call_parameters,
    forward_of,
    signature_of,
)
from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.probes import (
    CONFIG,
    GENERAL,
    OWN_HEAD_DIM,
    Formula,
    Probe,
    SpecialCase,
    most_biases,
)
from mha.implementations.inference.projections import ParameterMap
from mha.implementations.process.pristine import as_found
from mha.spec import Claims, Config, MaskConvention, Output, Sizes, Weights
from mha.spec.claims import Alignment, EmptyRow

Kind = TypeVar("Kind", bound="Candidate")

GPU = "cuda"


@dataclass
class Candidate:
    """One way to understand a class, or a `functools.partial` of one.

    parameters, layout, mask, mask_shape, mask_numbers, mask_required, masked_number,
        memory_optional, query_last, padding, rotation_pairs: as for `from_module`. label: the name
        of the class.
    causal_by_default: how the causal mask is aligned that a call without a mask has, and a mask
        takes the place of.
    formula: what the module computes, if `explained`; otherwise no formula gives its outputs.
        special: the case in which the formula is tested. shown: what is special about it, or about
        one in which no mask can be tried. claims: those that differ from `Claims()`, added as they
        are found. changes, dtype: of trial runs, to their configuration and the dtype. problem,
        raised: what the last call raised, as a line and in full. beside: what it returns beside its
        output, if not the weights.
    weights_at: `weights` of `from_module`. one_head: why a single head is not claimed, if it is
        not. other_widths, other_lengths, other_keys: what other widths of heads, lengths, or
        numbers of keys raise, if they are not claimed. too_long: what a call with long inputs
        raised. hint: what the causal flag raises, if it only says that the mask is causal. last:
        the module that was called last. assumed: why the format of masks is assumed, if none
        explains what they do. ignored: whether masks of this format have no effect. hides_queries:
        whether masks hide the queries of padding too, and are not judged. drops_otherwise: whether
        it drops in training, but neither weights nor outputs.
    empty_row: the policy for rows without a key, if one is found. detached: whether its outputs
        have no gradients.
    flag_fault: what is wrong with its causal flag, if that does not do what it says. idle_flag: a
        flag of the constructor that has no effect, and is not judged. left_out: a value of such a
        flag that is not judged, so that masks are. flag_left_out: whether calls leave the causal
        flag out, so that the constructor decides.
    idle_options: what a call may say about the scores, and has no effect. assumed_options: what has
        another effect than each reading that is known, so that it is read as its name says.
    longest: the length for which it is built in trial runs, if it asks for the longest one.
    """

    constructor: Callable[..., nn.Module]
    parameters: ParameterMap
    label: str
    layout: str = "b l d"
    formula: Formula = field(default_factory=Formula)
    mask: MaskConvention | None = None
    mask_shape: str | None = None
    mask_numbers: bool = False
    mask_required: bool = False
    masked_number: MaskedNumber = "-inf"
    memory_optional: bool = False
    query_last: bool | None = None
    padding: PaddingConvention | None = None
    causal_by_default: Alignment | None = None
    claims: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    explained: bool = False
    special: SpecialCase = GENERAL
    shown: str = ""
    problem: str = ""
    raised: Raised | None = None
    beside: str = ""
    weights_at: str | int | None = None
    one_head: str = ""
    other_widths: str = ""
    other_lengths: str = ""
    other_keys: str = ""
    too_long: str = ""
    hint: str = ""
    last: nn.Module = field(default_factory=nn.Module)
    assumed: str = ""
    ignored: bool = False
    hides_queries: bool = False
    drops_otherwise: bool = False
    empty_row: EmptyRow | None = None
    detached: bool = False
    rotation_pairs: bool = False
    flag_fault: str = ""
    idle_flag: str = ""
    idle_options: tuple[str, ...] = ()
    assumed_options: tuple[str, ...] = ()
    left_out: str = ""
    flag_left_out: bool = False
    longest: int = SHORT

    def options(self) -> dict[str, Any]:
        """Return the arguments for `from_module`, except the claims."""
        shape: dict[str, Any] = {"mask_shape": self.mask_shape} if self.mask_shape else {}
        shape |= {"mask_numbers": True} if self.mask_numbers else {}
        shape |= {"mask_required": True} if self.mask_required else {}
        shape |= {"masked_number": self.masked_number} if self.masked_number != "-inf" else {}
        shape |= {"memory_optional": True} if self.memory_optional else {}
        shape |= {} if self.query_last is None else {"query_last": self.query_last}
        shape |= {"rotation_pairs": True} if self.rotation_pairs else {}
        shape |= {"padding": self.padding} if self.padding else {}
        shape |= {"causal_by_default": True} if self.masks.causal_by_default else {}
        layout: dict[str, Any] = {"layout": self.layout} if self.layout != "b l d" else {}
        layout |= {} if self.weights_at is None else {"weights": self.weights_at}
        return {"parameters": self.parameters, "mask": self.mask, **shape, **layout}

    @property
    def masks(self) -> MaskFormat:
        """The format of its masks."""
        causal = bool(self.causal_by_default and self.mask)
        return MaskFormat(
            self.mask,
            self.mask_shape,
            self.mask_numbers,
            self.padding,
            causal,
            self.mask_required,
            self.masked_number,
        )

    def mask_of(self, probe: Probe, axes: str, *, causal: bool = False) -> Tensor:
        """Return a mask as `Probe.mask` does, but of the first keys, where its format is their
        number.
        """
        mask = probe.mask(axes, causal=causal or bool(self.formula.causal))
        return mask.sort(-1, descending=True).values if self.masks.counts_keys else mask

    def implementation(self) -> ModuleImplementation:
        """Return the implementation that this candidate declares."""
        # Where one is required, a format is tried before its claims are known.
        masks = self.masks.limits(Claims()) if self.mask_required or not self.mask else {}
        made = from_module(
            self.constructor,
            **self.options(),
            claims=Claims(**masks | self.claims),
            name=self.label,
        )
        return replace(made, call=self.as_called(made.call))

    def for_trials(self) -> ModuleImplementation:
        """Return the implementation, with room for no more than trial runs need."""
        return replace(self.implementation(), room=Room(self.longest))

    def as_called(self, call: Call) -> Call:
        """Return a call without the causal flag, if that is left out."""
        if not (self.flag_left_out and isinstance(call, CallByName)):
            return call
        return replace(call, signature=replace(call.signature, is_causal=None))

    @property
    def constructor_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of what is called to build a module."""
        return parameters_of(self.constructor)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters that a `functools.partial` sets, each with its value."""
        return getattr(self.constructor, "keywords", {})

    def built_with(self: Kind, name: str, *, value: bool) -> Kind:
        """Return the candidate with a parameter of the constructor set."""
        return replace(
            self, constructor=partial(self.constructor, **{name: value}), claims=dict(self.claims)
        )

    @property
    def cross_attention(self) -> bool | Literal["memory"]:
        """What its inputs may be, as in `Claims`."""
        claimed: bool | Literal["memory"] = self.claims.get("cross_attention", True)
        return claimed

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The inputs of trial runs."""
        return self.special.probes(self.cross_attention, self.sizes.length_multiple)

    @property
    def sizes(self) -> Sizes:
        """The claimed sizes."""
        claimed: Sizes = self.claims.get("sizes", Sizes())
        return claimed

    @property
    def device(self) -> str:
        """The device of trial runs."""
        return GPU if self.claims.get("devices") == {"cuda"} else "cpu"

    @property
    def config(self) -> Config:
        """The configuration of trial runs."""
        claimed = self.sizes.fit_head_dim(CONFIG.head_dim)
        own = (
            OWN_HEAD_DIM
            if "own_head_dim" in self.claims
            else claimed
            if claimed != CONFIG.head_dim
            else None
        )
        key_heads = 1 if "multi_query" in self.claims else None
        bias = most_biases(self.claims.get("bias", {True}))
        return replace(
            CONFIG, **{"bias": bias, "n_kv_heads": key_heads, "d_head": own} | self.changes
        )

    @property
    def weights(self) -> Weights:
        """The weights of trial runs."""
        return self.special.weights_of(self.config)

    @property
    def plainly_causal(self) -> bool:
        """Whether a call without a mask is asked to be causal, so that the formula gives its
        output.

        Where a causal flag does not do what it says, that is what is claimed, and not what the
        formula is.
        """
        return bool(self.claims.get("always_causal") if self.flag_fault else self.formula.causal)

    @property
    def evidence(self) -> str:
        """How it was found that its formula is that of the module."""
        if self.shown:
            return f"assumed: it explains the output only {self.shown}"
        return "tested" if self.explained else "assumed: its output matches no known formula"

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of `forward`."""
        cls = module_class(self.constructor)
        assert cls is not None
        return call_parameters(forward_of(cls))

    @property
    def signature(self) -> Signature:
        """What the parameters of `forward` mean."""
        return self.signature_with(padding=self.padding is not None)

    @property
    def may_leave_out_memory(self) -> bool:
        """Whether its calls are given a memory, and could be made without one."""
        return self.cross_attention == "memory" and self.signature.has_optional_memory

    @property
    def mask_alone(self) -> str | None:
        """The name of its mask in calls without a memory, if such are made."""
        names = signature_of(
            self.forward_parameters, padding=self.padding is not None, self_attention=True
        )
        return names.mask if self.memory_optional else None

    def signature_with(self, *, padding: bool) -> Signature:
        """What they mean if one mask is of key padding, or if none is."""
        options: dict[str, Any] = {"padding": padding, "query_last": self.query_last}
        found = signature_of(
            self.forward_parameters, **options, self_attention=not self.cross_attention
        )
        return found.with_rotations(of_pairs=self.rotation_pairs)

    def call(
        self,
        inputs: tuple[Tensor, ...],
        *,
        training: bool = False,
        change: Callable[[nn.Module], object] | None = None,
        **options: Any,
    ) -> Output | None:
        """Build the module and call it; if that raises, return None and set `problem`.

        change: is given the module before the call. options: of the call.
        """
        same = {id(x): x.to(self.device, self.dtype) for x in inputs}  # one tensor stays one tensor
        mask = options.get("mask")
        if isinstance(mask, Tensor):
            options["mask"] = mask.to(
                self.device, self.dtype if mask.is_floating_point() else mask.dtype
            )
        # Without gradients, a module may take other masks, as the fast path of
        # `torch.nn.MultiheadAttention` does.
        with torch.enable_grad(), as_found(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of inputs that it may not take
            try:
                weights = self.weights.to(self.dtype)
                attention = self.for_trials().build(
                    self.config, weights, dtype=self.dtype, device=self.device
                )
                if change:
                    change(attention.module)
                self.last = attention.train(training)
                result = compiled_again(
                    lambda: self.last(*(same[id(x)] for x in inputs), **options)
                )
                return Output(*map(_on_the_cpu, result))
            except (Exception, SystemExit) as error:  # the class may raise anything
                self.raised = Raised.of(error)
                self.problem = self.raised.text
                return None

    def call_plainly(self, inputs: tuple[Tensor, ...], **options: Any) -> Output | None:
        """Call it without a mask, and causally only if it always is."""
        return self.call(inputs, is_causal=self.plainly_causal, **options)

    def left_behind(self) -> list[str]:
        """Return the dotted names of the tensors that the last call left on attributes of the
        module.
        """
        modules = self.last.get_submodule("module").named_modules()
        return [
            f"{path}.{name}" if path else name
            for path, module in modules
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        ]


def without_gradients(candidate: Kind) -> Kind:
    """Return a candidate that claims no gradients: its weights do not require any, in trial runs
    too.
    """
    return replace(candidate, claims=candidate.claims | {"gradients": False})


def on_a_gpu(candidate: Kind) -> Kind:
    """Return a candidate that claims a GPU alone, and is tried there."""
    return replace(candidate, claims=candidate.claims | {"devices": {"cuda"}}, problem="")


def may_need_a_gpu(candidate: Candidate) -> bool:
    """Return whether a candidate whose calls raise may be tried on a GPU."""
    return "devices" not in candidate.claims and torch.cuda.is_available()


def _on_the_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
