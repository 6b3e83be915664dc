"""Everything that determines the result of one call: configuration, weights and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mha.spec.claims import Alignment, Claims
from mha.spec.config import Config
from mha.spec.masks import alibi_bias, causal_mask, chunk_mask, window_mask
from mha.spec.scores import Options
from mha.spec.weights import Weights

INPUTS = ("query", "key", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The inputs of one call, with the configuration and the weights of the attention.

    query: (B, L, D).
    key: (B, S, kdim), perhaps the same tensor as another one.
    value: (B, S, vdim), the same.
    options: what the call says beside the inputs; the causal mask has the alignment that the
        implementation claims.
    places: the positions of the queries, (L,), where these are some rows of a longer problem, or
        None. Keys have the positions from 0 on.
    square: whether there must be a query for each key, as where they are heads of one sequence.

    >>> config, x = Config(d_model=6, n_heads=2), torch.ones(1, 5, 6)
    >>> weights = Weights.random(config, seed=0, dtype=x.dtype)
    >>> problem = Problem(config, weights, query=x[:, :3], key=x, value=x)
    >>> problem.shape
    (1, 2, 3, 5)
    >>> list(problem.distinct())
    ['query', 'key']
    >>> masked = problem.change(mask=torch.tensor([[True], [False], [True]]))
    >>> masked.empty_rows(None).flatten().tolist()
    [False, True, False, False, True, False]
    """

    config: Config
    weights: Weights
    query: Tensor
    key: Tensor
    value: Tensor
    options: Options = field(default_factory=Options)
    square: bool = False
    places: Tensor | None = None

    def change(self, **fields: Any) -> Problem:
        """Return a copy with some fields replaced, those of options and weights too.

        An example is `change(mask=..., w_q=...)`. Without projections, a change of those of an
        input is one of the input. Raises ValueError for one of the output's.
        """
        of_weights, of_options = dict[str, Any](), dict[str, Any]()
        for name in list(fields):
            if name in Weights.__dataclass_fields__:
                of_weights[name] = fields.pop(name)
            elif name in Options.__dataclass_fields__:
                of_options[name] = fields.pop(name)
        if of_options:
            fields["options"] = fields.get("options", self.options).change(**of_options)
        changed = replace(self, **fields)
        if not of_weights:
            return changed
        if self.config.projected:
            return replace(changed, weights=replace(changed.weights, **of_weights))
        return changed._with_projected_inputs(of_weights)

    def of_heads(self) -> Problem:
        """Return the same attention without projections: its inputs are the projected heads.

        They are side by side, and rounded to the dtype.
        """
        config = self.config.of_heads()
        weights = Weights.identity(config, self.query.dtype, self.query.device)
        parts = dict(self.weights.named())
        inputs: dict[str, Any] = {}
        for name in INPUTS:
            inputs[name] = _projected(getattr(self, name), parts, name[0])
        return replace(self, config=config, weights=weights, **inputs)

    def _with_projected_inputs(self, parts: dict[str, Tensor | None]) -> Problem:
        """Return a problem without projections whose inputs are what these would make of them."""
        known = dict(self.weights.named())
        for name in ("w_o", "b_o"):
            changed = parts.get(name)
            if changed is not None and not torch.equal(changed, known[name]):
                raise ValueError(f"{name} cannot be changed where there are no projections")
        given = {name: x for name, x in parts.items() if x is not None and name[-1] != "o"}
        roles = {name[-1] for name in given}
        inputs = {name: getattr(self, name) for name in INPUTS}
        for name, x in inputs.items():
            if name[0] in roles:
                inputs[name] = _projected(x, known | given, name[0])
        return replace(self, **inputs)

    def map_inputs(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return a copy with query, key and value changed; one tensor stays one tensor."""
        changed: dict[int, Tensor] = {}
        for tensor in self.distinct().values():
            changed[id(tensor)] = change(tensor)
        return replace(
            self,
            query=changed[id(self.query)],
            key=changed[id(self.key)],
            value=changed[id(self.value)],
        )

    def cpu(self) -> Problem:
        """Return the problem on the CPU, itself if it is there; one tensor stays one tensor."""
        if self.query.device.type == "cpu":
            return self
        weights = self.weights.to(self.weights.w_q.dtype, "cpu")
        mask = None if self.mask is None else self.mask.cpu()
        places = None if self.places is None else self.places.cpu()
        return self.map_inputs(torch.Tensor.cpu).change(weights=weights, mask=mask, places=places)

    def distinct(self, names: Sequence[str] = INPUTS) -> dict[str, Tensor]:
        """Return these inputs by name, a tensor once, under the first of its names."""
        by_identity: dict[int, tuple[str, Tensor]] = {}
        for name in names:
            tensor = getattr(self, name)
            by_identity.setdefault(id(tensor), (name, tensor))
        return dict(by_identity.values())

    def call(self, attention: Callable[..., Any]) -> Any:
        """Return what an attention with this configuration and these weights gives."""
        return attention(self.query, self.key, self.value, **self.options.arguments)

    def scale(self, claims: Claims) -> float:
        """Return the scale of the call, or else the scale that is claimed."""
        if self.options.scale is None:
            return claims.scale_for(self.config.head_dim)
        return self.options.scale

    def alibi_bias(self, claims: Claims) -> Tensor:
        """Return the bias of the slopes of the call in float64, in its claimed form.

        It is (H, L, S), or (B, H, L, S) for slopes of each item.
        """
        declared, slopes = claims.scores.alibi, self.options.alibi
        if declared is None or slopes is None:
            raise ValueError(
                "a bias of slopes needs slopes in the options, and the claim Scores(alibi=...)"
            )
        batch, _, queries, keys = self.shape
        alignment = claims.alignment or "top_left"
        lengths = self.options.lengths_of(batch, queries, keys)
        if lengths is None:
            bias = alibi_bias(slopes, declared.form, queries, keys, alignment)
            return bias.to(self.query.device)
        bias = torch.zeros(self.shape, dtype=torch.float64)
        for item, (own_queries, own_keys) in enumerate(lengths):
            of_item = slopes[item] if isinstance(slopes[0], tuple) else slopes
            near = alibi_bias(of_item, declared.form, own_queries, own_keys, alignment)
            bias[item, :, :own_queries, :own_keys] = near
        return bias.to(self.query.device)

    @property
    def mask(self) -> Tensor | None:
        """The mask of the call, see `Options`."""
        return self.options.mask

    @property
    def is_causal(self) -> bool:
        """Whether the causal mask applies as well."""
        return self.options.is_causal

    @property
    def is_self(self) -> bool:
        """Whether the queries change with the keys, as in self-attention."""
        return self.square or self.query is self.key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores, (B, H, L, S)."""
        return self.query.shape[0], self.config.n_heads, self.query.shape[1], self.key.shape[1]

    @property
    def output_shape(self) -> torch.Size:
        """The shape of the output: of the query or, without projections, of the contexts."""
        if self.config.projected:
            return self.query.shape
        return torch.Size((*self.query.shape[:-1], self.config.context_width))

    def allowed(self, alignment: Alignment | None) -> Tensor:
        """Return which query may attend to which key, boolean (B, H, L, S).

        That is by mask, causal mask, window, chunks and lengths together.

        alignment: that of the causal mask, the window and the chunks.

        Raises ValueError if it is None and there is one of these.
        """
        device, options = self.query.device, self.options
        is_cut = self.is_causal or bool(options.window or options.chunk)
        if alignment is None and is_cut:
            raise ValueError(
                "a causal mask, a window or chunks need an alignment, but the implementation claims"
                " causal=None"
            )
        allowed = torch.ones(self.shape, dtype=torch.bool, device=device)
        if self.mask is not None:
            forbidding = -math.inf if self.mask.is_floating_point() else 0
            allowed = allowed & (self.mask != forbidding)
        batch, _, queries, keys = self.shape
        lengths = options.lengths_of(batch, queries, keys)
        if lengths is None:
            return allowed & self._near(alignment, queries, keys)
        present = torch.zeros_like(allowed)
        for item, (own_queries, own_keys) in enumerate(lengths):
            near = self._near(alignment, own_queries, own_keys)
            present[item, :, :own_queries, :own_keys] = near
        return allowed & present

    def _near(self, alignment: Alignment | None, queries: int, keys: int) -> Tensor:
        """Return which of so many keys causal mask, window and chunks allow, boolean (L, S)."""
        device, options = self.query.device, self.options
        near = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if alignment is None:
            return near
        if self.is_causal:
            near = near & causal_mask(queries, keys, alignment, device)
        if options.window is not None:
            near = near & window_mask(queries, keys, options.window, alignment, device)
        if options.chunk is not None:
            near = near & chunk_mask(queries, keys, options.chunk, alignment, device)
        return near

    def empty_rows(self, alignment: Alignment | None) -> Tensor:
        """Return the queries that may attend to no key, boolean (B, H, L).

        alignment: as for `allowed`.
        """
        empty = ~self.allowed(alignment).any(-1)
        if self.options.sinks is not None:
            empty = empty & ~self._has_sink()[:, None]
        return torch.zeros_like(empty) if self.config.extra_keys else empty

    def _has_sink(self) -> Tensor:
        """Return which heads have a sink, boolean (H,): one of -infinity is none."""
        sinks = self.options.sinks
        if sinks is None:
            sinks = (-math.inf,) * self.config.n_heads
        return torch.as_tensor(sinks, device=self.query.device).detach().isfinite()


def _projected(x: Tensor, parts: Mapping[str, Tensor], role: str) -> Tensor:
    """Return x W^T + b, rounded to the dtype of x once."""
    matrix, bias = parts[f"w_{role}"].detach().double(), parts.get(f"b_{role}")
    projected = x.detach().double() @ matrix.T
    if bias is not None:
        projected = projected + bias.detach().double()
    return _laid_out_as(x, projected)


def _laid_out_as(x: Tensor, numbers: Tensor) -> Tensor:
    """Return numbers in the dtype of a tensor and, if they have its shape, in its memory layout."""
    if numbers.shape != x.shape or x.stride(-1) == 0:
        return numbers.to(x.dtype)
    # A row that is expanded is the same after a projection.
    single = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    one = x[single]
    laid_out = torch.empty_strided(one.size(), one.stride(), dtype=x.dtype, device=x.device)
    return laid_out.copy_(numbers[single]).expand(x.shape)
