"""`from_module`: judge a `torch.nn.Module` class as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calls import Call, by_name
from mha.implementations.adapters.loading import load, weight_gradients
from mha.implementations.errors import ImplementationError
from mha.spec import Claims, Config, MaskConvention, Output, Weights

# The constructor's words for the fields of Config.
CONSTRUCTOR_WORDS = {
    "d_model": ("d_model", "embed_dim", "dim", "hidden_dim", "hidden_size"),
    "n_heads": ("n_heads", "num_heads", "heads", "n_head", "nhead", "h"),
    "bias": ("bias",),
    "dropout": ("dropout",),
    "n_kv_heads": ("n_kv_heads", "num_kv_heads"),
    "kdim": ("kdim",),
    "vdim": ("vdim",),
    "bias_kv": ("bias_kv", "add_bias_kv"),
    "zero_key": ("zero_key", "add_zero_attn"),
    "length_first": ("length_first", "batch_first"),
}


Parameters = Mapping[str, str] | Callable[[Config], Mapping[str, str]]
# The forms of mask that are claimed where nothing else is said.
MASKS_OF = {"keep": {"bool"}, "drop": {"bool"}, "additive": {"bool", "float"}}


def from_module(
    constructor: Callable[..., nn.Module],
    *,
    parameters: Parameters,
    mask: MaskConvention | None = "keep",
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
) -> ModuleImplementation:
    """Adapt a module class, or a `functools.partial` of one, to the contract.

    constructor: called with d_model and n_heads, and with the other fields of `Config` where it takes them.
    parameters: where the weights are loaded: "w_q", "w_k", "w_v" and "w_o" to the dotted name of a linear layer, of a
        list of one layer per head, or of a parameter; "w_qkv" or "w_kv" for projections stacked in that order; "b_..."
        for a bias that is no part of a layer; "extra_k" and "extra_v" for what `Config.bias_kv` adds.
        A function of the configuration that returns such a map serves where the names depend on it.
    mask: the module's convention for boolean masks, "keep" (True = may attend), "drop" (True = may not), "additive"
        (0 or -infinity is added), or None where it takes no mask.
    call: how to call the module; by default by the names of the parameters of `forward` (see `by_name`).
    claims: what the module can do; by default `Claims()`, with float masks too if `mask` is "additive", and without
        masks if it is None. Where they are without gradients, the weights are built to require none.
    name: by default the class's name.

    Raises ImplementationError where the constructor or `forward` cannot be understood.
    """
    target = constructor.func if isinstance(constructor, partial) else constructor
    label = name or str(getattr(target, "__name__", "module"))
    if not (inspect.isclass(target) and issubclass(target, nn.Module)):
        raise ImplementationError(f"from_module needs a torch.nn.Module class, but got {constructor!r}")
    if claims is None:
        claims = Claims(masks=MASKS_OF.get(mask, {"bool"})) if mask else Claims(masks=(), causal=None)
    if mask is None and claims.masks:
        raise ImplementationError(f"{label}: mask=None says that it takes no mask, but claims.masks is {claims.masks}")
    words = _constructor_words(label, constructor)
    caller = call or by_name(label, target.forward, mask, claims.causal)
    return ModuleImplementation(label, claims, constructor, parameters, words, caller)


@dataclass(frozen=True, eq=False)
class ModuleImplementation:
    """A module class as an implementation; made by `from_module`."""

    name: str
    claims: Claims
    constructor: Callable[..., nn.Module]
    parameters: Parameters
    words: Mapping[str, str]
    call: Call

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> ModuleAttention:
        """Construct the module and load the weights; what the constructor raises is its refusal of `config`."""
        options = {word: getattr(config, field) for field, word in self.words.items()}
        if "batch_first" in self.words.values():
            options["batch_first"] = not config.length_first
        module = self.constructor(**options).to(device=device, dtype=dtype)
        parameters = self.parameters(config) if callable(self.parameters) else self.parameters
        load(self.name, module, parameters, weights)
        if not self.claims.gradients:
            module.requires_grad_(False)
        return ModuleAttention(module, self.call, parameters, weights)


class ModuleAttention(nn.Module):
    """A module with its weights; `module` is the user's own object."""

    def __init__(self, module: nn.Module, call: Call, parameters: Mapping[str, str], weights: Weights) -> None:
        super().__init__()
        self.module, self.call, self.parameter_names = module, call, parameters
        self.rows = {name: len(tensor) for name, tensor in weights.named()}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> Output:
        """Call the module in its own convention."""
        return self.call(self.module, query, key, value, mask=mask, is_causal=is_causal, need_weights=need_weights)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        """Call the module's own `decode`; see `mha.spec.Decoder`."""
        decode: Any = self.module.decode
        return decode(query, key, value, *rest, **named)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        return weight_gradients(self.module, self.parameter_names, self.rows)


def _constructor_words(label: str, constructor: Callable[..., Any]) -> dict[str, str]:
    taken = inspect.signature(constructor).parameters
    words = {}
    for field, candidates in CONSTRUCTOR_WORDS.items():
        found = next((word for word in candidates if word in taken), None)
        if found:
            words[field] = found
        elif field in ("d_model", "n_heads"):
            raise ImplementationError(
                f"{label}: its constructor takes ({', '.join(taken)}), none of which is a known word for {field} "
                f"({', '.join(candidates)}); wrap the class in one that takes {field}"
            )
    return words
