"""Cases for kernels: frozen records that make the same tensors everywhere, without Hypothesis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.case_values import VALUES, Source
from mha.conformance.embedded.undisturbed import undisturbed
from mha.spec.dtypes import torch_dtype
from mha.spec.scores import Bounds, Options

# Keys that a mask of a kind allows: of all places (L, S), from the place of each query.
TILE = 64
# Masks that are added to the scores.
ADDED = ("bias", "heads", "empty item")
# Sinks of a head, from a number in [-3, 3].
SINKS = {"zero": 0.0, "high": 20.0, "low": -20.0, "none": -math.inf}


@dataclass(frozen=True, eq=False)
class BuiltCase:
    """The tensors of a case and what the call says beside them.

    query: (B, H, L, d_k).
    key: (B, H_kv, S, d_k).
    value: (B, H_kv, S, d_v).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True, kw_only=True, repr=False)
class KernelCase:
    """One call of a kernel. Its repr omits fields that have their default, and runs as code.

    clause: what it is a case of.
    about: what it tries, in words.
    B, H, H_kv, L, S, d, d_v: the sizes; H_kv and d_v are H and d if they are 0.
    dtype: by name.
    values: a name in `mha.conformance.embedded.case_values`.
    causal, scale, window, chunk, softcap: as in `mha.spec.Options`.
    alignment: of causal mask, window and chunks.
    mask: "none", "padding" (hides the last keys of each item), "sorted" (as padding, and the first
        item has none), "random" (for each item and query), "rows" (as random, and some rows without
        a key), "first" (hides all of the first tile of keys), "each head" (for each item, head and
        query), "whole heads" (hides all keys from every second head), "bias" (added, with
        -infinity), "heads" (added, and different for each head), or "empty item" (added, and hides
        all keys of the last item).
    mask_once: the axes of (B, H, L, S) in which the mask has the size 1, and is broadcast.
    mask_rank: of how many dimensions the mask is; those in front are left out.
    sinks: "" for none, a name in `SINKS`, or "mixed" for all of them.
    slopes: whether there are slopes of ALiBi.
    lse: whether the log-sum-exp is asked for.
    no_grad: whether the call is made without gradients, as in inference.
    expanded: key and value are one item's, expanded over the batch.
    strided: the columns of a head are some of longer rows in memory, as in a packed projection.
    seed: of all random numbers.

    >>> case = KernelCase(clause="NUM-1", L=3, S=5, seed=1)
    >>> case
    KernelCase(clause='NUM-1', L=3, S=5, seed=1)
    >>> case.build("cpu").key.shape
    torch.Size([2, 2, 5, 32])
    """

    clause: str
    about: str = field(default="", compare=False)
    B: int = 2
    H: int = 2
    H_kv: int = 0
    L: int = 33
    S: int = 65
    d: int = 32
    d_v: int = 0
    dtype: str = "bfloat16"
    values: str = "targets"
    causal: bool = False
    alignment: str = "top_left"
    mask: str = "none"
    mask_once: tuple[int, ...] = ()
    mask_rank: int = 4
    window: Bounds | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: str = ""
    slopes: bool = False
    lse: bool = False
    no_grad: bool = False
    expanded: bool = False
    strided: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        shown = list[str]()
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default and each.name != "about":
                shown.append(f"{each.name}={value!r}")
        return f"KernelCase({', '.join(shown)})"

    @property
    def kv_heads(self) -> int:
        """How many key heads there are."""
        return self.H_kv or self.H

    @property
    def may_be_refused(self) -> bool:
        """Whether the call may raise: for inputs that are not dense, or a mask of one key."""
        return self.expanded or self.strided or 3 in self.mask_once

    def build(self, device: torch.device | str = "cpu", usual_scale: float = 0.0) -> BuiltCase:
        """Make the tensors of the call, the same on every device.

        usual_scale: what the kernel multiplies scores by where the call does not say so; 0 for
            1/sqrt(d_k).
        """
        with undisturbed():
            return self._built(torch.device(device), usual_scale)

    def _built(self, device: torch.device, usual_scale: float) -> BuiltCase:
        generator = torch.Generator().manual_seed(self.seed)
        batch = 1 if self.expanded else self.B

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        scale = self.scale
        if scale is None:
            scale = usual_scale or self.d**-0.5
        source = Source(
            normal(self.B, self.H, self.L, self.d),
            normal(batch, self.kv_heads, self.S, self.d).expand(self.B, -1, -1, -1),
            normal(batch, self.kv_heads, self.S, self.d_v or self.d).expand(self.B, -1, -1, -1),
            self._targets(),
            scale,
            generator,
        )
        dtype = torch_dtype(self.dtype)
        query, key, value = VALUES[self.values](source)
        tensors = [query.to(device, dtype)]
        for x in (key, value):
            of_items = x[:batch].to(device, dtype).contiguous()
            tensors.append(of_items.expand(self.B, -1, -1, -1) if self.expanded else of_items)
        return BuiltCase(tensors[0], tensors[1], tensors[2], self._options(device, generator))

    def _places(self) -> Tensor:
        """Return the place of each query among the keys, (L,)."""
        offset = self.S - self.L if self.alignment == "bottom_right" else 0
        return torch.arange(self.L) + offset

    def _targets(self) -> Tensor:
        """Return two keys of each query, (L, 2): one inside its window, and one at an edge.

        Targets inside go round all keys, the last ones first. The edges are, in turn, the keys
        just outside and just inside the window, or the chunk, on either side, and the first key.
        """
        places, numbers = self._places(), torch.arange(self.L)
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        first = torch.zeros_like(places) if left is None else places - left
        last = torch.full_like(places, self.S - 1) if right is None else places + right
        if self.chunk is not None:
            start = places.div(self.chunk, rounding_mode="floor") * self.chunk
            first = torch.maximum(first, start)
            last = torch.minimum(last, start + self.chunk - 1)
        first, last = first.clamp(0, self.S - 1), last.clamp(0, self.S - 1)
        inside = last - numbers * 7 % (last - first + 1).clamp(min=1)
        edges = torch.stack([last + 1, first - 1, last, first, torch.zeros_like(first)])
        edge = edges.gather(0, (numbers % len(edges)).unsqueeze(0)).squeeze(0)
        edge = torch.where((edge < 0) | (edge >= self.S), inside, edge)
        return torch.stack([inside, edge], 1)

    def _options(self, device: torch.device | str, generator: torch.Generator) -> Options:
        """Return what the call says beside its tensors."""
        mask = self._mask(generator)
        if mask is not None:
            mask = mask.to(device)
        draws = torch.randint(-12, 13, (self.H,), generator=generator) / 4
        given = dict[str, Any]()
        if self.sinks == "mixed":
            names = list(SINKS)
            kinds = [SINKS[names[head % len(names)]] for head in range(self.H)]
            given["sinks"] = tuple(a + float(b) for a, b in zip(kinds, draws, strict=True))
        elif self.sinks:
            given["sinks"] = tuple(SINKS[self.sinks] + float(each) for each in draws)
        if self.slopes:
            given["alibi"] = tuple(2.0 ** -(head + 1) for head in range(self.H))
        if self.lse:
            given["return_lse"] = True
        return Options(
            mask=mask,
            is_causal=self.causal,
            scale=self.scale,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            **given,
        )

    def _mask(self, generator: torch.Generator) -> Tensor | None:
        """Return the mask of the call, (B, 1 or H, L, S) without what is broadcast."""
        if self.mask == "none":
            return None
        make = self._added_mask if self.mask in ADDED else self._boolean_mask
        mask = make(generator)
        for axis in self.mask_once:
            mask = mask.narrow(axis, 0, 1)
        return mask.reshape(mask.shape[4 - self.mask_rank :]).clone()

    def _boolean_mask(self, generator: torch.Generator) -> Tensor:
        """Return a mask that is True where a query may attend."""
        shape, keys = (self.B, 1, self.L, self.S), torch.arange(self.S)
        if self.mask in ("padding", "sorted"):
            # A third of the keys more are hidden of each next item; of the first one, one or none.
            step, longest = max(1, self.S // 3), self.S - (self.mask == "padding")
            lengths = longest - torch.arange(self.B) * step % max(1, self.S - 1)
            return (keys < lengths.view(-1, 1, 1, 1)).expand(shape)
        if self.mask == "first":
            return (keys >= TILE).expand(shape)
        if self.mask == "whole heads":
            shown = torch.arange(self.H) % 2 == 0
            return shown.view(1, -1, 1, 1).expand(self.B, -1, self.L, self.S)
        allowed = self._some_keys(generator, self.H if self.mask == "each head" else 1)
        if self.mask == "rows":
            allowed[:, :, 1::3] = False
        return allowed

    def _added_mask(self, generator: torch.Generator) -> Tensor:
        """Return a mask that is added to the scores."""
        allowed = self._some_keys(generator, self.H if self.mask == "heads" else 1)
        if self.mask == "empty item":
            allowed[-1] = False
        added = torch.randn(allowed.shape, generator=generator, dtype=torch.float64)
        return added.masked_fill(~allowed, -math.inf).to(torch_dtype(self.dtype))

    def _some_keys(self, generator: torch.Generator, heads: int) -> Tensor:
        """Return a mask that allows seven of ten keys, and the first one, as causal masks do."""
        shape = (self.B, heads, self.L, self.S)
        allowed = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.7
        allowed[..., 0] = True
        return allowed
