"""A batch of sequences that a decoder takes position by position."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.assertions import expect, expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.plain import copied, viewed
from mha.conformance.harness.session import Instance, Session
from mha.spec import Problem

# At how many paces the items of a large batch advance.
PACES = 8


class DecodedSequence:
    """The positions of a problem, decoded one after another with the cache of the last step."""

    def __init__(self, session: Session, problem: Problem, via: Instance | None = None) -> None:
        session.scripted = False
        self.decoder: Any = (via or session.built(problem)).attention.eval()
        self.session, self.problem, self.cache = session, problem, None

    @property
    def inputs(self) -> list[Tensor]:
        """Query, key and value of all positions, each (B, L, D)."""
        return [self.problem.query, self.problem.key, self.problem.value]

    def decode(self, inputs: list[Tensor], active: Tensor | None = None) -> Tensor:
        """Decode n positions of query, key and value, each (B, n, D); return (B, n, D).

        active: boolean (B,), the items that have a position; all by default.
        """
        named = {}
        if active is not None:
            named["active"] = viewed(active)
        shape = tuple(inputs[0].shape)
        with torch.no_grad(), guarded("decode"):
            output, self.cache = self.decoder.decode(*inputs, self.cache, **named)
            if issubclass(type(output), Tensor):
                actual, result = f"{output.shape}", copied(output)
            else:
                actual, result = f"{output!r:.80}", torch.empty(0)
        fits = tuple(result.shape) == shape
        expect(fits, f"decode returned {actual}, but should return a tensor of shape {shape}")
        return result

    def decode_position(self, position: int) -> Tensor:
        """Decode the inputs at a position; return its output (B, 1, D)."""
        return self.decode([x[:, position : position + 1] for x in self.inputs])

    def decode_positions(self, start: int, end: int) -> Tensor:
        """Decode a range of positions at once; return their output (B, end - start, D)."""
        return self.decode([x[:, start:end] for x in self.inputs])

    def decode_ragged(self, generator: torch.Generator) -> Tensor:
        """Let items advance at paces of their own, any inputs in between; return all outputs."""
        items, length = self.problem.query.shape[:2]
        decoded, done = torch.zeros_like(self.problem.query), torch.zeros(items, dtype=torch.long)
        pace = 0.8 / (1 + torch.randperm(items, generator=generator) % PACES)
        while (done < length).any():
            waiting = done < length
            active = waiting & (torch.rand(items, generator=generator) < pace)
            if not active.any():
                active = waiting
            now = torch.arange(items), done.clamp(max=length - 1)
            own = active[:, None, None].to(decoded.device)
            inputs = [x[now].unsqueeze(1) for x in self.inputs]
            output = self.decode([x.where(own, 3 - x) for x in inputs], active.to(decoded.device))
            decoded[active, done[active]] = output.squeeze(1)[active]
            done += active
        return decoded

    def decode_until(self, end: int) -> None:
        """Decode the first inputs, one by one."""
        for position in range(end):
            self.decode_position(position)

    def decode_rest(self, start: int) -> Tensor:
        """Decode the inputs from a position on, one by one; return (B, L - start, D)."""
        positions = range(start, self.problem.query.shape[1])
        return torch.cat([self.decode_position(position) for position in positions], 1)

    def reorder(self, items: Tensor) -> None:
        """Let each item of the cache be the one at its place in `items` (B,)."""
        with torch.no_grad(), guarded("reorder_cache"):
            self.cache = self.decoder.reorder_cache(self.cache, viewed(items))

    def crop(self, length: int) -> None:
        """Let the cache have the first positions only."""
        with torch.no_grad(), guarded("crop_cache"):
            self.cache = self.decoder.crop_cache(self.cache, length)

    def branch(self, problem: Problem) -> DecodedSequence:
        """Return another sequence, which goes on with a copy of the cache."""
        other = copy(self)
        other.problem = problem
        with guarded("copy.deepcopy of the cache"):
            other.cache = deepcopy(self.cache)
        return other

    def expect_one_pass(self, decoded: Tensor, start: int = 0) -> None:
        """The outputs (B, L - start, D) from a position on are those of one causal pass."""
        result = self.session.unscripted(decoded, "decoded")
        expected = self.session.expected(self.problem).output[:, start:]
        expect_close(result, expected, because="one causal pass over all positions")
