"""Random admissible roundings everywhere: their projections against Hoeffding's tail.

As a program it prints a table; its argument is how many thousands of draws there are of each form.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mha.spec.directed import Allowance
from support.random_roundings import PROFILES
from support.random_roundings import random_projections as of_outputs
from support.random_roundings_of_gradients import FORMS
from support.random_roundings_of_gradients import random_projections as of_gradients

AT_ONCE = 1000
LENGTHS = (1.0, 2.0, 3.0, 4.0)


def forms() -> Iterator[tuple[str, Callable[[int], tuple[Tensor, Allowance]]]]:
    """Yield each form by its name, with what makes draws of it from a seed."""
    for profile in PROFILES:
        yield f"output, {profile}", lambda seed, profile=profile: of_outputs(profile, AT_ONCE, seed)  # type: ignore[misc]  # loop
    for form in FORMS:
        name = (
            f"gradients, D {'as dC.o' if form[0] else 'as rowsum(P dP)'}, P"
            f" {'recomputed' if form[1] else 'kept'}"
        )
        yield name, lambda seed, form=form: of_gradients(form, AT_ONCE, seed)  # type: ignore[misc]  # loop


def main(thousands: int) -> None:
    """Print a row for each form: the largest projection, and how many are how far off."""
    torch.set_num_threads(1)
    bounds = [
        f"more than {length:g} sd (at most {2 * math.exp(-(length**2) / 2):.2g})"
        for length in LENGTHS
    ]
    print(f"| form | rms of T/sd | largest | share of the threshold | {' | '.join(bounds)} |")
    print("|---" * (4 + len(LENGTHS)) + "|")
    for name, draw in forms():
        found = [draw(seed) for seed in range(thousands)]
        distance, part = torch.cat([distance for distance, _ in found]), found[0][1]
        tail = " | ".join(f"{float((distance > length).double().mean()):.2g}" for length in LENGTHS)
        root, largest = float(distance.square().mean().sqrt()), float(distance.max())
        print(
            f"| {name} | {root:.2f} | {largest:.2f} | {largest * part.sd / part.threshold:.2f} |"
            f" {tail} |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
