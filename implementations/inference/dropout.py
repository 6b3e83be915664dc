"""What a module drops in training, by the outputs that it gives then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import projected
from mha.implementations.inference.nearest_projections import agree, is_output
from mha.implementations.inference.probes import CONFIG, heads_of, is_close, tolerance_of
from mha.implementations.inference.projections import Undeclarable
from mha.spec import Output

# Kinds of dropout, the most general first.
KINDS = ("both", True, "output")
PROBABILITY = 0.5
# What the rest is multiplied by: the right factor, and two that clause DRP-2 rejects.
FACTORS = (1 / (1 - PROBABILITY), 1.0, 1 - PROBABILITY)
OTHERWISE = "not judged: in training it drops something other than whole weights or outputs"
RANDOM = (
    "two equal calls in evaluation return different outputs, as if it dropped with a fixed"
    " probability, which clause DRP-1 forbids; drop in training only, as F.dropout(weights, p,"
    " self.training) does, or let a function take p, 0 by default"
)
WORDS = {
    True: "the weights",
    "output": "the output",
    "both": "the weights and the output",
    "each": "the weights and the output, each with a probability of its own",
}


def find_dropout(candidate: Candidate) -> Candidate:
    """Claim the kind of dropout that the constructor takes, if outputs in training show it.

    Raises Undeclarable for outputs that are random without such an argument, unless
    `torch.nn.functional.dropout` makes them random: that is left out.
    """
    fields = set(candidate.arguments.values())
    named = {"dropout", "output_dropout"} & fields
    if candidate.explained and (named or "config" in fields):
        candidate = _with_kind(candidate, has_both=len(named) > 1)
    if not named and "dropout" not in candidate.claims and _is_random_in_training(candidate):
        return _without_fixed_dropout(candidate)
    return candidate


def _without_fixed_dropout(candidate: Candidate) -> Candidate:
    """Return a module without its dropout of a fixed probability; raises as `find_dropout` does."""
    neutral = {**candidate.declared.neutral, "dropout": nn.Identity}
    tried = candidate.declaring(neutral=neutral)
    if candidate.is_kernel or _is_random_in_training(tried):
        raise Undeclarable(
            "in training its outputs are random, as if it dropped with a fixed probability; let the"
            " constructor take that as dropout"
        )
    found = "not judged: in training it drops with a fixed probability, which is left out"
    return tried.noting("dropout", found)


def _seeded(seed: int, module: nn.Module) -> None:
    """Seed the random numbers of a call, once its module is built."""
    del module
    torch.manual_seed(seed)


def _with_kind(candidate: Candidate, *, has_both: bool) -> Candidate:
    """Claim the kind of dropout that outputs show; some kind, if it drops in evaluation too.

    has_both: whether the constructor takes a probability for the weights and one for the output.
    """
    changes = {**candidate.trial.changes, "dropout": PROBABILITY}
    tried = {kind: candidate.claiming(dropout=kind).trying(changes=changes) for kind in KINDS}
    most_general = tried[KINDS[0]]
    shown = [kind for kind in KINDS if dropped(tried[kind]) == kind]
    if not shown and _drops_in_evaluation(most_general):
        shown = [KINDS[0]]
    if shown:
        kind = "each" if has_both and shown[0] == "both" else shown[0]
        found = f"drops {WORDS[kind]} in training"
        return candidate.claiming(dropout=kind).noting("dropout", found)
    x = candidate.probes[0].inputs[0][:, :1]
    takes_one_key = most_general.call_plainly((x, x, x), training=True) is not None
    if takes_one_key and _is_random_in_training(most_general):
        return candidate.noting("dropout", OTHERWISE)
    return candidate


def _drops_in_evaluation(tried: Candidate) -> bool:
    probe = tried.probes[0]
    result = tried.call_plainly(probe.inputs)
    if result is None:
        return False
    return not is_close(result.output, tried.formula(probe.inputs, tried.weights, None))


def require_repeatable(candidates: Iterable[Candidate]) -> None:
    """Raise Undeclarable for what drops in evaluation too, so that no formula gives its outputs.

    candidates: the ways to understand it, the first of which that can be called is.
    """
    for each in candidates:
        if each.call_plainly(each.probes[0].inputs) is not None:
            if _is_random(each, training=False):
                raise Undeclarable(RANDOM)
            return


def _is_random_in_training(candidate: Candidate) -> bool:
    """Return whether calls in training differ, though one in evaluation is explained."""
    return candidate.explained and _is_random(candidate, training=True)


def _is_random(candidate: Candidate, *, training: bool) -> bool:
    """Return whether two equal calls return other outputs."""
    results, inputs = [], candidate.probes[0].inputs
    for seed in range(2):
        # What is not loaded has the same initial values in both.
        options: dict[str, Any] = {"change": partial(_seeded, seed)}
        if candidate.is_kernel:
            options = {}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed if candidate.is_kernel else 0)
            results.append(candidate.call_plainly(inputs, training=training, **options))
    return _are_outputs(results) and not agree(*results)


def _are_outputs(results: Sequence[Output | None]) -> bool:
    """Return whether calls returned tensors."""
    return all(result is not None and isinstance(result.output, Tensor) for result in results)


def dropped(tried: Candidate) -> bool | str | None:
    """Return what is dropped in training: True for weights, "output" or "both", None otherwise.

    With one key, a head's context is its value, or zero where the weight is dropped: an output is
    one of the sums over subsets of the heads, and zero where the output is dropped.
    """
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 1, CONFIG.d_model, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        result = tried.call_plainly((x, x, x), training=True)
    if result is None or not is_output(result, x):
        return None
    output = result.output.detach().double()[:, 0]
    for factor in FACTORS:
        kind = _dropped_with(factor, output, tried, x)
        if kind:
            return kind
    return None


def _dropped_with(factor: float, output: Tensor, tried: Candidate, x: Tensor) -> bool | str | None:
    """Return what is dropped, if what is kept is multiplied by a factor.

    output: (N, D), of inputs x (N, 1, D).
    """
    n_heads = tried.config.n_heads
    subsets = torch.tensor([*product((0.0, 1.0), repeat=n_heads)], dtype=torch.float64)
    every = _outputs(tried, x, torch.ones(1, n_heads, dtype=torch.float64))[0]
    sums = _outputs(tried, x, factor * subsets)
    distance, zero = tolerance_of(tried.trial.dtype) * float(output.abs().max()), output == 0
    if bool(near(output, sums, distance).all(-1).any(0).all()):
        are_all_kept = bool(near(output, sums[-1], distance).all())
        return None if are_all_kept else True
    if not bool(zero.any()):
        return None
    if bool((zero | near(output, every * factor, distance)).all()):
        return "output"
    of_both = (zero | near(output, sums * factor, distance)).all(-1).any(0)
    return "both" if bool(of_both.all()) else None


def _outputs(tried: Candidate, x: Tensor, factors: Tensor) -> Tensor:
    """Return the outputs (N, B, D) for inputs (B, 1, D) if the weights of the heads are factors.

    factors: (N, H).
    """
    values = heads_of(x, tried.weights, "v", tried.config.n_heads)[:, :, 0]
    return projected(tried, (values * factors[:, None, :, None]).flatten(2))


def near(output: Tensor, expected: Tensor, distance: float) -> Tensor:
    """Return which elements are no further from each other than a distance."""
    return (output - expected).abs() <= distance
