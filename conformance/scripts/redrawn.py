"""The numbers of a case in a script, drawn as the case does: as bytes they would fill pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from mha.conformance.cases.case import SHARING, Case
from mha.conformance.cases.values import make_inputs
from mha.conformance.harness.recording import BuildStep, CallStep
from mha.conformance.harness.session import Session
from mha.spec import Weights
from mha.spec.problem import INPUTS

# Up to so many numbers in all a script has their bits, which need no generator.
FEW = 4096
# In place of a weight that is not there.
NONE = torch.empty(0)


def redrawn(session: Session, names: dict[int, str]) -> list[str]:
    """Return the lines that draw the numbers of the first call, and name them.

    There are none if the numbers are few, or are not those that the case draws.
    """
    first = _first_call(session)
    if first is None:
        return []
    build, call = first
    case, dtype, problem = session.case, f"torch.{session.case.dtype}", call.problem
    sizes = problem.query.shape[0], problem.query.shape[1], problem.key.shape[1]
    weights, *inputs = make_inputs("normal", build.config, sizes, case.generator)
    given = dict(build.weights.named())
    # Names in the script, with the tensor that was used and the one that is drawn.
    found: list[tuple[str, Tensor, Tensor]] = []
    for name, drawn in weights.named():
        found.append((f"{name}_{build.number}", given.pop(name, NONE), drawn))
    lines = [
        "# The numbers of the case, drawn as it draws them.",
        f"generator = torch.Generator().manual_seed({case.seed})",
        "seed = int(torch.randint(2**31, (1,), generator=generator))",
        *_weights(weights, build, dtype),
        f"shapes = {', '.join(str(tuple(x.shape)) for x in inputs)}",
        (
            "inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in"
            " shapes]"
        ),
    ]
    for name, x in problem.distinct().items():
        index = SHARING[case.inputs][INPUTS.index(name)]
        found.append((f"{name}_{call.number}", x, inputs[index]))
        lines.append(f"{name}_{call.number} = inputs[{index}].to({dtype})")
    few = sum(x.numel() for _, x, _ in found) <= FEW
    if few or given:
        return []
    for _, x, drawn in found:
        if not _is_rounded(x, drawn):
            return []
    names |= {id(x): name for name, x, _ in found}
    return lines + _upstream(session.case, call, names)


def _weights(weights: Weights, build: BuildStep, dtype: str) -> list[str]:
    """Return the lines that draw the weights as `Weights.random` does, absent biases included."""
    matrices: dict[str, tuple[int, ...]] = {}
    vectors: dict[str, int] = {}
    held: list[str] = []
    for name, x in weights.named():
        if x.ndim == 1:
            held.append(name)
        else:
            matrices[name] = tuple(x.shape)
            vectors[f"b_{name[2:]}"] = len(x)
    for name in ("extra_k", "extra_v"):
        if name in held:
            vectors[name] = matrices["w_k"][0]
    normal = "generator=of_weights, dtype=torch.float64"

    def names(drawn: Iterable[str], kept: Collection[str]) -> str:
        return ", ".join(f"{name}_{build.number}" if name in kept else "_" for name in drawn)

    lines = [
        "of_weights = torch.Generator().manual_seed(seed)",
        f"shapes = {', '.join(map(str, matrices.values()))}",
        f"matrices = [torch.randn(n, m, {normal}) / m**0.5 for n, m in shapes]",
        f"{names(matrices, matrices)} = (x.to({dtype}) for x in matrices)",
    ]
    if not held:
        return lines
    lengths = ", ".join(map(str, vectors.values()))
    return [
        *lines,
        f"vectors = [torch.randn(n, {normal}) / 2 for n in ({lengths})]",
        f"{names(vectors, held)} = (x.to({dtype}) for x in vectors)",
    ]


def _upstream(case: Case, call: CallStep, names: dict[int, str]) -> list[str]:
    """Return the line that draws the gradient of the output, if it was drawn so."""
    upstream = call.upstream
    if upstream is None:
        return []
    if not _is_rounded(upstream, torch.randn(upstream.shape, generator=case.generator)):
        return []
    name = names[id(upstream)] = f"upstream_{call.number}"
    generator = f"torch.Generator().manual_seed({case.seed})"
    return [
        f"{name} = torch.randn({tuple(upstream.shape)},"
        f" generator={generator}).to(torch.{case.dtype})"
    ]


def _first_call(session: Session) -> tuple[BuildStep, CallStep] | None:
    """Return the first call and how its attention was built, if the case may draw its numbers."""
    if session.case.values != "normal" or session.case.device != "cpu":
        return None
    builds = [step for step in session.steps if isinstance(step, BuildStep)]
    calls = [step for step in session.steps if isinstance(step, CallStep)]
    if not builds or not calls:
        return None
    for name in INPUTS:
        if getattr(calls[0].problem, name).dim() != 3:
            return None
    return builds[0], calls[0]


def _is_rounded(x: Tensor, drawn: Tensor) -> bool:
    """Return whether a tensor is what was drawn, rounded to its dtype, and as dense."""
    return x.shape == drawn.shape and x.is_contiguous() and x.equal(drawn.to(x.dtype))
