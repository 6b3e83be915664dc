"""A sharded implementation as one that is not: it runs on ranks, and gathers what they return."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mha.conformance.sharding.group import group
from mha.conformance.sharding.rank import Build, Call, Differentiate
from mha.implementations.adapters.pickled import pickled
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.resolve import original_of
from mha.spec import (
    Attention,
    Claims,
    Config,
    Implementation,
    Options,
    Output,
    Sharded,
    Weights,
    positions,
)
from mha.spec.problem import INPUTS
from mha.spec.rounding import MOST_MERGES

_numbers = count(1)


@dataclass(frozen=True, eq=False)
class OnRanks:
    """A sharded implementation on some ranks.

    members: their numbers in a group that may be larger; the mesh has them in this sequence.
    """

    implementation: Sharded
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the implementation."""
        return self.implementation.name

    @property
    def claims(self) -> Claims:
        """The claims of the implementation."""
        return self.implementation.claims

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Gathered:
        """Build the attention on every rank.

        Raises what all ranks raise, `RankError` if they disagree, and ImplementationError where the
        implementation cannot be sent to them or claims no such number of ranks.
        """
        if refused := refused_ranks(self.implementation, len(self.members)):
            raise ImplementationError(refused)
        needed, found = max(self.members) + 1, torch.cuda.device_count()
        if device == "cuda" and found < needed:
            raise ImplementationError(
                f"{needed} ranks need as many CUDA devices, and torch finds {found}; judge on 'cpu'"
            )
        return Gathered(self, config, weights.to(dtype, device), dtype, device)


class Gathered(nn.Module):
    """An attention whose forward and backward passes run on ranks.

    copies: what every rank returned of a tensor that each has whole, by name: "output", and after a
    backward pass inputs, and weights.
    """

    def __init__(
        self, on: OnRanks, config: Config, weights: Weights, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.on, self.config, self.weights = on, config, weights
        self.dtype, self.device = dtype, device
        self.copies: dict[str, list[Tensor]] = {}
        self.number = next(_numbers)
        self.names = [name for name, _ in weights.named()]
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        self.joined = 0
        self._build()

    def _build(self) -> None:
        """Build the attention on the ranks, unless it is there.

        Other ranks may have been started since.
        """
        if self.joined == group.joined and group.members:
            return
        code, files = pickled(self.on.implementation)
        build = Build(
            number=self.number,
            code=code,
            files=files,
            path=tuple(sys.path),
            config=self.config,
            weights=self.weights,
            dtype=self.dtype,
            device=self.device,
        )
        group.join(self.on.members, self.device, self.on.implementation)
        group.ask([build] * self.size)
        self.joined = group.joined

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.on.members)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Return the gathered output; see `mha.spec.Attention`."""
        self._build()
        options = Options(**given)
        weights = map(self.get_parameter, self.names)
        tensors = query, key, value, options.mask, *weights
        output: Tensor = _OnRanks.apply(self, options.change(mask=None), _grad_mode(), *tensors)  # type: ignore[no-untyped-call]  # of torch
        return Output(output)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        found = dict[str, Tensor]()
        for name in self.names:
            held: Tensor = getattr(self, name)
            found[name] = torch.zeros_like(held) if held.grad is None else held.grad.clone()
        return found

    def in_larger_group(self) -> Gathered:
        """Return the same attention on the last ranks of a group that has one more."""
        on = OnRanks(self.on.implementation, tuple(range(1, self.size + 1)))
        return Gathered(on, self.config, self.weights, self.dtype, self.device)

    def parts(self, name: str, whole: Tensor) -> list[Tensor]:
        """Return what each rank gets of a tensor (B, length, width) that has a placement."""
        if not self.is_sharded(name):
            return [whole] * self.size
        return [whole[:, places] for places in self.places(whole.shape[1])]

    def shared_out(
        self, inputs: Mapping[str, Tensor], mask: Tensor | None
    ) -> list[dict[str, Tensor | None]]:
        """Return the inputs and the mask of each rank, by name.

        Inputs that are one tensor are one on each rank, if they are placed alike.
        """
        parts: dict[tuple[int, bool], list[Tensor]] = {}
        given: dict[str, list[Any]] = {"mask": [None] * self.size}
        if mask is not None:
            given["mask"] = self.rows(mask.detach())
        for name, tensor in inputs.items():
            same = id(tensor), self.is_sharded(name)
            if same not in parts:
                parts[same] = self.parts(name, tensor.detach())
            given[name] = parts[same]
        of_ranks = zip(*given.values(), strict=True)
        return [dict(zip(given, own, strict=True)) for own in of_ranks]

    def rows(self, mask: Tensor) -> list[Tensor]:
        """Return the rows of a mask for the queries that each rank has."""
        if not self.has_rows(mask):
            return [mask] * self.size
        return [mask[..., places, :] for places in self.places(mask.shape[-2])]

    def has_rows(self, mask: Tensor) -> bool:
        """Return whether a mask is sharded as the queries are."""
        return mask.ndim > 1 and mask.shape[-2] > 1 and self.is_sharded("query")

    def gathered(self, name: str, parts: Sequence[Tensor], length: int, dim: int = 1) -> Tensor:
        """Return a tensor put together from what each rank has of it."""
        if not self.is_sharded(name):
            self.copies[name] = list(parts)
            return parts[0]
        in_order = torch.cat(self.places(length)).argsort().to(self.device)
        return torch.cat(list(parts), dim).index_select(dim, in_order)

    def is_sharded(self, name: str) -> bool:
        """Return whether a tensor is sharded over the sequence."""
        return bool(self.on.implementation.placements[name].is_shard())

    def places(self, length: int) -> list[Tensor]:
        """Return the positions that each rank has of a sharded sequence."""
        return positions(self.on.implementation.order, length, self.size)


class _OnRanks(torch.autograd.Function):
    """One call on all ranks, and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, attention: Gathered, options: Options, grad_mode: str, *tensors: Tensor | None
    ) -> Tensor:
        """Send each rank its parts, and gather the output.

        tensors: query, key, value, mask, and the weights.
        """
        *inputs_, mask = tensors[: len(INPUTS) + 1]
        inputs = {name: x for name, x in zip(INPUTS, inputs_, strict=True) if x is not None}
        names = (*INPUTS, "mask", *attention.names)
        # The first three arguments are no tensors.
        needed = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        wanted: tuple[str, ...] = ()
        if grad_mode == "grad":
            wanted = tuple(name for name in (*INPUTS, "mask") if needed[name])
        given = attention.shared_out(inputs, mask)
        training, seed = attention.training, 0
        if training and attention.config.drops:
            seed = int(torch.randint(1 << 31, ()))
        requests = [
            Call(attention.number, parts, options, training, grad_mode, wanted, seed)
            for parts in given
        ]
        outputs = group.ask(requests)
        ctx.attention, ctx.inputs, ctx.mask, ctx.needed = attention, inputs, mask, needed
        attention.copies.clear()
        return _checked(attention, "output", outputs, inputs["query"])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Send each rank its part of the upstream gradient, and gather the gradients."""
        attention, mask = ctx.attention, ctx.mask
        needs_any = any(ctx.needed[name] for name in attention.names)
        needs_weights = attention.on.claims.weight_gradients and needs_any
        parts = attention.parts("output", upstream)
        requests = [Differentiate(attention.number, part, needs_weights) for part in parts]
        answers = group.ask(requests)
        found: dict[str, Tensor] = {}
        for name in answers[0]:
            own = [answer[name] for answer in answers]
            if name in INPUTS:
                found[name] = _checked(attention, name, own, ctx.inputs[name])
            elif name != "mask":
                attention.copies[name] = own
                found[name] = own[0]
            elif attention.has_rows(mask):
                found[name] = attention.gathered("query", own, mask.shape[-2], mask.ndim - 2)
            else:
                found[name] = torch.stack(own).sum(0)
        names = (*INPUTS, "mask", *attention.names)
        return None, None, None, *map(found.get, names)


def _grad_mode() -> str:
    """Return the name of the gradient mode of this call."""
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def _checked(attention: Gathered, name: str, parts: list[Tensor], like: Tensor) -> Tensor:
    """Return the gathered tensor once each rank's part has the shape that the placement says."""
    expected = attention.parts(name, like)
    for rank, (part, own) in enumerate(zip(parts, expected, strict=True)):
        shape = tuple(own.shape)
        if name == "output":
            shape = (*own.shape[:2], attention.config.d_model)
        if part.shape != shape:
            raise ValueError(
                f"rank {rank} has a part of {name} of shape {tuple(part.shape)}, but should have"
                f" {shape}"
            )
    return attention.gathered(name, parts, like.shape[1])


def on_ranks(implementation: Implementation, ranks: int) -> Implementation:
    """Return an implementation on so many ranks; as it is if that is 0, or if it is not sharded."""
    original = original_of(implementation)
    if ranks and isinstance(original, Sharded):
        return OnRanks(original, tuple(range(ranks)))
    return implementation


def refused_ranks(implementation: Implementation, ranks: int) -> str:
    """Return why an implementation that claims ranks does not run on so many; empty if it does."""
    claimed = implementation.claims.world_sizes
    if not claimed or ranks in claimed:
        return ""
    return (
        f"{implementation.name} claims {sorted(claimed)} ranks (Claims.world_sizes), not {ranks}; "
        "give the case another `ranks`"
    )


def runs_on_ranks_only(implementation: Implementation) -> bool:
    """Return whether an implementation has no form without ranks."""
    original = original_of(implementation)
    return isinstance(original, Sharded) and original.unsharded is None


def claims_on_ranks(claims: Claims, ranks: int) -> Claims:
    """Return the claims with the number of ranks, and a merge for each rank after the first."""
    if ranks < 2:
        return claims
    merges = min(claims.rounding.merges + ranks - 1, MOST_MERGES)
    rounding = replace(claims.rounding, merges=merges, ranks=ranks)
    return replace(claims, rounding=rounding)


def keys_of_rank(implementation: Implementation, rank: int, ranks: int, length: int) -> Tensor:
    """Return which of so many keys a rank has, boolean (S,).

    If all ranks have all, it is those that it would have in a contiguous order.
    """
    original = original_of(implementation)
    order = original.order if isinstance(original, Sharded) else "contiguous"
    own = torch.zeros(length, dtype=torch.bool)
    own[positions(order, length, ranks)[rank]] = True
    return own


def in_larger_group(attention: Attention) -> Attention:
    """Return an attention on ranks that are a part of a larger group, if it runs on ranks."""
    return attention.in_larger_group() if isinstance(attention, Gathered) else attention


def copies_of(attention: Attention) -> Mapping[str, Sequence[Tensor]]:
    """Return the copies of an attention on ranks; none for another."""
    return attention.copies if isinstance(attention, Gathered) else {}
