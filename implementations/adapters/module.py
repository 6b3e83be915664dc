"""`from_module`: judge a `torch.nn.Module` class as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import Call, by_name
from mha.implementations.adapters.loading import KEYS, Place, load, weight_gradients
from mha.implementations.errors import ImplementationError
from mha.spec import Claims, Config, MaskConvention, Output, Weights

# The constructor's words for what it may be given: fields of Config, and what follows from them.
CONSTRUCTOR_WORDS = {
    "d_model": (
        *("d_model", "embed_dim", "dim", "hidden_dim", "hidden_size", "embed_size", "emb_dim", "emb_size", "n_embd"),
        *("embedding_dim", "model_dim", "query_dim", "d_in", "d_out", "input_dim", "hid_dim", "n_state", "emb"),
        "channels",
    ),
    "n_heads": ("n_heads", "num_heads", "heads", "n_head", "nhead", "num_attention_heads", "head_count", "h"),
    "head_dim": ("head_dim", "d_head", "dim_head", "d_k", "d_v", "head_size"),
    "bias": ("bias", "qkv_bias", "use_bias"),
    "dropout": (
        *("dropout", "dropout_prob", "dropout_rate", "attn_drop", "attn_dropout", "attn_pdrop", "attention_dropout"),
        "attention_probs_dropout_prob",
    ),
    "no_dropout": ("proj_drop", "proj_dropout", "resid_drop", "resid_dropout", "resid_pdrop", "hidden_dropout_prob"),
    "longest": ("block_size", "context_length", "max_len", "max_length", "max_seq_len", "max_position_embeddings"),
    "n_kv_heads": ("n_kv_heads", "num_kv_heads"),
    "kdim": ("kdim",),
    "vdim": ("vdim",),
    "bias_kv": ("bias_kv", "add_bias_kv"),
    "zero_key": ("zero_key", "add_zero_attn"),
    "batch_first": ("batch_first",),
    "config": ("config", "cfg", "args"),
}
# What a module that must know the longest sequence is built for; in self-attention no case is longer.
LONGEST = 2048

Parameters = Mapping[str, Place] | Callable[[Config], Mapping[str, Place]]
# The forms of mask that are claimed where nothing else is said.
MASKS_OF = {"keep": {"bool"}, "drop": {"bool"}, "additive": {"bool", "float"}}


def from_module(
    constructor: Callable[..., nn.Module],
    *,
    parameters: Parameters,
    mask: MaskConvention | None = "keep",
    mask_shape: str | None = None,
    mask_numbers: bool = False,
    layout: str = "b l d",
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
) -> ModuleImplementation:
    """Adapt a module class, or a `functools.partial` of one, to the contract.

    constructor: called by the names of its parameters, as far as `CONSTRUCTOR_WORDS` knows them; a
        `functools.partial` gives the others. One parameter `config` gets an object that has all these names.
    parameters: where the weights are loaded: "w_q", "w_k", "w_v" and "w_o" to the dotted name of a linear layer, of a
        list of one layer per head ("heads.*.q" for a layer of each of a list), or of a parameter; "w_qkv" or "w_kv" for
        projections stacked in that order; "b_..." for a bias that is no part of a layer; "extra_k" and "extra_v" for
        what `Config.bias_kv` adds; None for a projection that there is not. A name and an einops pattern, as
        ("qkv", "(r h e) d -> (h r e) d"), say how a weight (out, in) lies there: r counts the stacked projections, and
        e the columns of a head; the last axis on the left is that of the inputs.
        A function of the configuration that returns such a map serves where the names depend on it.
    mask: the module's convention for boolean masks, "keep" (True = may attend), "drop" (True = may not), "additive"
        (0 or -infinity is added), or None where it takes no mask.
    mask_shape: the shape of mask that it takes, as "b s", "b 1 l s" or "(b h) l s", if it takes no broadcast (B, H, L,
        S); see `Claims.per_head_mask` and `Claims.per_query_mask`.
    mask_numbers: whether it takes ones and zeros of the query's dtype for a boolean mask.
    layout: the order of b (batch), l (length) and d (d_model) in inputs and output, "b l d" or "l b d".
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
    if not (callable(parameters) or isinstance(parameters, Mapping)):
        raise ImplementationError(
            f"{label}: parameters must map {KEYS} to names in the module, but is {parameters!r:.80}"
        )
    if layout not in ("b l d", "l b d"):
        raise ImplementationError(f"{label}: layout must be 'b l d' or 'l b d', but is {layout!r}")
    words = constructor_words(label, constructor)
    caller = call or by_name(label, target.forward, mask, claims, layout, mask_shape, mask_numbers)
    return ModuleImplementation(label, claims, constructor, parameters, words, caller, layout, mask_shape)


@dataclass(frozen=True, eq=False)
class ModuleImplementation:
    """A module class as an implementation; made by `from_module`."""

    name: str
    claims: Claims
    constructor: Callable[..., nn.Module]
    parameters: Parameters
    words: Mapping[str, str]
    call: Call
    layout: str = "b l d"
    mask_shape: str | None = None

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> ModuleAttention:
        """Construct the module and load the weights; what the constructor raises is its refusal of `config`."""
        module = construct(self.constructor, self.words, config).to(device=device, dtype=dtype)
        parameters = self.parameters(config) if callable(self.parameters) else self.parameters
        load(self.name, module, parameters, weights, config.head_dim)
        if not self.claims.gradients:
            module.requires_grad_(False)
        return ModuleAttention(module, self, config, parameters, weights)


class ModuleAttention(nn.Module):
    """A module with its weights; `module` is the user's own object."""

    def __init__(
        self,
        module: nn.Module,
        adapter: ModuleImplementation,
        config: Config,
        parameters: Mapping[str, Place],
        weights: Weights,
    ) -> None:
        super().__init__()
        self.module, self.adapter, self.config, self.parameter_names = module, adapter, config, parameters
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
        if mask is not None and self.adapter.mask_shape:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask.expand(-1, self.config.n_heads, -1, -1)  # which refuses any other number than 1
        named: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "need_weights": need_weights}
        if self.adapter.layout == "b l d":
            return self.adapter.call(self.module, query, key, value, **named)
        turned = {id(x): x.transpose(0, 1) for x in (query, key, value)}  # what is one tensor stays one
        query, key, value = (turned[id(x)] for x in (query, key, value))
        output, weights = self.adapter.call(self.module, query, key, value, **named)
        return Output(output.transpose(0, 1) if isinstance(output, Tensor) else output, weights)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        """Call the module's own `decode`; see `mha.spec.Decoder`."""
        decode: Any = self.module.decode
        return decode(query, key, value, *rest, **named)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        found = weight_gradients(self.module, self.parameter_names, self.rows, self.config.head_dim)
        lost = {name: rows for name, rows in self.rows.items() if name not in found}
        width = {"w_k": self.config.key_width, "w_v": self.config.value_width}
        for name, rows in lost.items():  # of a projection that there is not
            shape = (rows, width.get(name, self.config.d_model)) if name.startswith("w") else (rows,)
            found[name] = next(self.module.parameters()).new_zeros(shape)
        return found


def construct(constructor: Callable[..., nn.Module], words: Mapping[str, str], config: Config) -> nn.Module:
    """Call a constructor with what its words mean in a configuration."""
    meant: dict[str, Any] = {"no_dropout": 0.0, "longest": LONGEST, "batch_first": not config.length_first}
    meant["n_kv_heads"] = config.kv_heads
    meant |= {
        field: getattr(config, field) for field in CONSTRUCTOR_WORDS if field not in meant and hasattr(config, field)
    }
    every = {word: meant[field] for field, known in CONSTRUCTOR_WORDS.items() if field in meant for word in known}
    meant["config"] = SimpleNamespace(**every)
    return constructor(**{word: meant[field] for word, field in words.items()})


def constructor_words(label: str, constructor: Callable[..., Any]) -> dict[str, str]:
    """Return what each parameter of a constructor is given, as far as its name is known.

    Raises ImplementationError where none is for d_model or n_heads, or one that is needed is unknown.
    """
    taken = inspect.signature(constructor).parameters
    words = {word: field for field, known in CONSTRUCTOR_WORDS.items() for word in known if word in taken}
    for field in ("d_model", "n_heads"):
        if field not in words.values() and "config" not in words.values():
            known = ", ".join(CONSTRUCTOR_WORDS[field])
            raise ImplementationError(
                f"{label}: its constructor takes ({', '.join(taken)}), none of which is a known word for {field} "
                f"({known}); derive a class from it whose constructor takes d_model and n_heads"
            )
    unknown = [
        name
        for name, p in taken.items()
        if name not in words and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown:
        raise ImplementationError(
            f"{label}: its constructor needs {', '.join(unknown)}, of which nothing is known; give "
            f"functools.partial({label}, {unknown[0]}=...)"
        )
    return words
