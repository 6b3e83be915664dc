"""The part of a rounding graph between projections and scores: a norm and a rotation of heads.

The places, for queries and keys each: what is projected; for a layer norm, the mean, and the
numbers less their mean; the root of the mean of squares; the weights, where 1 is added to them;
normed numbers, before and after the weights; cosines and sines; and rotated numbers, with the two
products that each one adds. What they are for: `mha.spec.directed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.head_steps import Norm, Step
from mha.spec.rotation import Rotation
from mha.spec.rounding_places import Place, copies_of
from mha.spec.units import Units

Uses = tuple[tuple[Tensor, ...], ...]
# A root is a mean of squares, each stored, less than half of whose roundings reach it; its sum with
# eps, a half; and the root or its inverse.
ROOT_STORES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """Queries or keys on their way, exactly.

    name: "query" or "key".
    before: what each step gets, (B, heads, length, d_k).
    """

    name: str
    steps: Sequence[Step]
    before: Sequence[Tensor]

    def narrowed(self) -> Way:
        """Return the same in float32."""
        return replace(self, before=[x.float() for x in self.before])

    def gradients(self, g: Tensor) -> dict[str, Uses]:
        """Return d<w, y*> / dx for each place; g: that of the last numbers."""
        found = dict[str, Uses]()
        for step, x in zip(reversed(self.steps), reversed(self.before), strict=True):
            if isinstance(step, Norm):
                found |= self._of_norm(step, x, g)
                g = step.pulled_back(x, g)
            else:
                found |= self._of_rotation(step, x, g)
                g = step.exact(g, back=True)
        return found | {f"projected {self.name}": ((g,),)}

    def _of_norm(self, step: Norm, x: Tensor, g: Tensor) -> dict[str, Uses]:
        y, r, name = step.exact(x), step.root(x), self.name
        found: dict[str, Uses] = {
            f"normed {name}": ((g,),),
            f"root of {name}": ((-(g * y).sum(step.axes, keepdim=True) / r,),),
        }
        if step.weight is not None:
            h = step.centred(x) / r
            found[f"norm weight of {name}"] = (((g * h).sum_to_size(step.weight.shape),),)
        if step.norm.kind == "layer":
            of_centred = step.pulled_back_to_centred(x, g)
            of_mean = -of_centred.sum(step.axes, keepdim=True)
            found |= {f"centred {name}": ((of_centred,),), f"mean of {name}": ((of_mean,),)}
        return found

    def _of_rotation(self, step: Rotation, x: Tensor, g: Tensor) -> dict[str, Uses]:
        width, name = step.cosines.shape[-1], self.name
        turned, arriving = x[..., :width], g[..., :width]
        of_cosines = step.by_pairs((arriving * turned).sum((0, 1)))
        of_sines = step.by_pairs((arriving * step.others(turned)).sum((0, 1)))
        return {
            f"rotated {name}": ((g,),),
            f"cosines of {name}": ((of_cosines,),),
            f"sines of {name}": ((of_sines,),),
        }


class Noted:
    """Takes exact heads through the steps, and notes each place where a number may be stored."""

    def __init__(
        self, name: str, dtype: torch.dtype, units: Units, places: Mapping[str, Place]
    ) -> None:
        self.name, self.dtype, self.units, self.places = name, dtype, units, places

    def through(self, steps: Sequence[Step], x: Tensor) -> tuple[Tensor, Way]:
        """Return heads as the scores get them, and their way."""
        before = list[Tensor]()
        for step in steps:
            before.append(x)
            y = step.exact(x)
            if isinstance(step, Norm):
                self._norm(step, x, y)
            else:
                self._rotation(step, x, y)
            x = y
        return x, Way(self.name, steps, before)

    def variance(self, way: Way, last: Tensor) -> Tensor:
        """Return what all stores on the way do to the last numbers, squared, in units of u_s^2."""
        name = self.name
        found = self.places[f"projected {name}"].squares(way.before[0])
        for step, x in zip(way.steps, way.before, strict=True):
            if isinstance(step, Norm):
                y, r = step.exact(x), step.root(x)
                h = step.centred(x) / r
                weight = 1.0 if step.weight is None else step.weight
                # (a - h mean(a h))^2 <= 2 a^2 + 2 h^2 mean(a h)^2
                spread = found + h.square() * step.variance_of_total(h.square() * found)
                found = 2 * weight * weight * spread / r.square()
                found = found + (y / r).square() * self.places[f"root of {name}"].square
                found = found + self.places[f"normed {name}"].squares(y)
            else:
                y = step.exact(x)
                tables = step.on_heads(
                    self.places[f"cosines of {name}"].square,
                    self.places[f"sines of {name}"].square,
                    x.square(),
                )
                found = step.squares(found) + tables + self.places[f"rotated {name}"].squares(y)
        return found + self.places[name].squares(last)

    def _store(self, place: str, copies: Tensor, *forms: tuple[Tensor, float | Tensor]) -> None:
        self.places[f"{place} {self.name}"].store(self.dtype, self.units, copies, *forms)

    def _norm(self, step: Norm, x: Tensor, y: Tensor) -> None:
        units, r, terms = self.units, step.root(x), step.terms(x)
        c = step.centred(x)
        for _ in range(ROOT_STORES):
            self._store("root of", copies_of(r), (r, 1.0))
        ratio = step.total(x.square()) / r.square()
        self.places[f"root of {self.name}"].own += (1.5 * units.gamma(terms + 3) * ratio) * r
        self.places[f"root of {self.name}"].own += 8 * units.accumulate * r
        if step.norm.kind == "layer":
            mean = step.mean(x)
            self._store("mean of", copies_of(mean), (mean, 1.0))
            of_mean = units.gamma(terms + 3) * step.mean(x.abs())
            self.places[f"mean of {self.name}"].own += of_mean
            self._store("centred", copies_of(c), (c, 1.0))
            size = x.abs() + mean.abs()
            self.places[f"centred {self.name}"].own += 4 * units.accumulate * size
        self._store("normed", copies_of(y), (y, 1.0))
        self.places[f"normed {self.name}"].own += 4 * units.accumulate * y.abs()
        if step.norm.kind == "unit_rms":  # before the product with the root of the width
            root = math.sqrt(terms)
            self._store("normed", copies_of(y), (y / root, 1 / root))
        if step.weight is not None:
            h, weight = c / r, step.weight
            scale = torch.where(weight == 0, 1.0, weight).expand_as(h)
            self._store("normed", copies_of(h), (h, 1 / scale))
            if step.norm.weight == "offset":
                # Queries' and keys' are two.
                self._store("norm weight of", copies_of(weight), (weight, 1.0))

    def _rotation(self, step: Rotation, x: Tensor, y: Tensor) -> None:
        units = self.units
        span = step.span(x)
        self._store("rotated", copies_of(y), (y, 1.0))
        place = self.places[f"rotated {self.name}"]
        lost = units.subnormal + units.flush
        place.store_parts(copies_of(y), y, span, 2, lost)
        place.own += 3 * units.accumulate * span
        error = step.by_pairs(step.error - step.units.store, halved=True)
        for what, columns in (("cosines of", step.cosines), ("sines of", step.sines)):
            numbers = step.by_pairs(columns, halved=True)
            # Those of queries and of keys are the same numbers.
            self._store(what, 2 * copies_of(numbers), (numbers, 1.0))
            self.places[f"{what} {self.name}"].own += error
