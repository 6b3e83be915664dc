"""A failure as a stand-alone script, of torch and the author's code, or else of this package."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep, Step
from mha.conformance.harness.session import Session
from mha.conformance.scripts.literals import (
    WIDTH,
    assertion_lines,
    by_name,
    config_code,
    in_mode,
    name_tensor,
    refused,
    switched,
)
from mha.conformance.scripts.on_ranks import RankScript, rank_script
from mha.conformance.scripts.plain import plain_script
from mha.conformance.scripts.redrawn import redrawn
from mha.conformance.scripts.terms import InexpressibleError, from_here, path_line
from mha.implementations.discovery.loaded import MAINS, names_of
from mha.implementations.discovery.resolve import original_of, split_name
from mha.spec import CLAUSES, Implementation
from mha.spec.problem import INPUTS

# What a script may need besides torch.
MODULES = ("base64", "copy", "io", "runpy", "sys", "types", "warnings", "zlib")
THREADS = "torch.set_num_threads(1)  # as it was judged"


def script(session: Session, clause: str, violation: Violation, *, target: str = "") -> str | None:
    """Return a script that fails as a session did, or None where its steps do not show that.

    target: how the implementation was named; see `mha.implementations.resolve`.
    """
    if not session.scripted or not (violation.assertion or isinstance(violation, CallRaised)):
        return None
    try:
        imports, body = plain_script(session, violation, target)
    except InexpressibleError as reason:
        lines = _with_this_package(session, violation, target, str(reason))
    else:
        lines = [*_imports(body, imports.modules), "", *imports.lines(), "", THREADS, *body]
    return "\n".join([*_docstring(session, clause), "", *lines]) + "\n"


def _with_this_package(
    session: Session, violation: Violation, target: str, reason: str
) -> list[str]:
    """Return the lines of a script that needs this package, after those that say what it shows."""
    ranks, names = rank_script(session, violation), dict[int, str]()
    body = redrawn(session, names)
    for step in session.steps:
        lines = _lines(step, session, names, ranks)
        if step is session.steps[-1] and violation.must_raise and not ranks:
            lines = refused(lines, step.number, builds=isinstance(step, BuildStep))
        body += lines
    body += assertion_lines(violation, violation.assertion, in_try=not ranks)
    program = ranks.function(body) if ranks else body
    return [
        f"# This script needs mha-conformance: {reason}.",
        *_imports(body, ranks=ranks),
        "",
        *_import(session.implementation, target),
        "from mha.spec import Config, Weights",
        "",
        THREADS,
        *program,
    ]


def _docstring(session: Session, clause: str) -> list[str]:
    known = CLAUSES[clause]
    first = textwrap.fill(f'"""{clause} ({known.level}): {known.statement}', WIDTH)
    return [first, "", f"{session.case!r}", '"""']


def _imports(
    body: Sequence[str], others: Collection[str] = (), ranks: RankScript | None = None
) -> list[str]:
    """Return the lines that import what a script needs besides the implementation.

    others: more modules.
    """
    lines = []
    for module in MODULES:
        if module in others or _uses(body, rf"\b{module}\."):
            lines.append(f"import {module}")
    if ranks:
        lines.append("from datetime import timedelta")
    if lines:
        lines.append("")
    lines.append("import torch")
    if ranks:
        lines.append("import torch.distributed as dist")
    names = [name for name in ("inf", "nan", "tensor") if _uses(body, rf"(?<![\w.']){name}\b")]
    if names:
        lines.append(f"from torch import {', '.join(names)}")
    if ranks:
        lines.append("from torch.distributed.device_mesh import DeviceMesh")
    return lines


def _uses(body: Sequence[str], pattern: str) -> bool:
    return any(re.search(pattern, line) for line in body)


def _lines(
    step: Step, session: Session, names: dict[int, str], ranks: RankScript | None
) -> list[str]:
    match step:
        case BuildStep():
            return _build(step, session, names, ranks)
        case DeriveStep():
            # On ranks, the mesh is in a larger group from the start.
            code = "{}" if ranks else step.code
            return [f"attention_{step.number} = {code.format(f'attention_{step.origin}')}"]
        case CallStep():
            return _call(step, session, names, ranks)


def _build(
    build: BuildStep, session: Session, names: dict[int, str], ranks: RankScript | None
) -> list[str]:
    lines: list[str] = []
    weights: dict[str, str] = {}
    for name, tensor in build.weights.named():
        weights[name] = name_tensor(tensor, f"{name}_{build.number}", names, lines)
    arguments = [config_code(build.config), f"Weights({by_name(weights)})"]
    if ranks:
        arguments.append("mesh=mesh")
    arguments += [f"dtype=torch.{session.case.dtype}", f"device={session.case.device!r}"]
    method = "implementation.build_rank" if ranks else "implementation.build"
    lines.append(f"attention_{build.number} = {method}({', '.join(arguments)})")
    return lines


def _call(
    call: CallStep, session: Session, names: dict[int, str], ranks: RankScript | None
) -> list[str]:
    lines: list[str] = []
    problem, number = call.problem, call.number
    given: dict[str, str] = {}
    for name in (*INPUTS, "mask"):
        tensor = getattr(problem, name)
        if tensor is not None:
            given[name] = name_tensor(tensor, f"{name}_{number}", names, lines)
    upstream = ""
    if call.upstream is not None:
        upstream = name_tensor(call.upstream, f"upstream_{number}", names, lines)
    if call.seed is not None:
        lines.append(f"torch.manual_seed({call.seed})")
    if call.switches:
        lines.append(switched(f"attention_{call.build}", call.mode))
    if ranks:
        return lines + ranks.call(call, given, upstream)
    return lines + _plain_call(call, given, upstream)


def _plain_call(call: CallStep, given: Mapping[str, str], upstream: str) -> list[str]:
    """Return the lines of a call in one process; the arguments are those of `RankScript.call`."""
    number, problem = call.number, call.problem
    inputs = [given[name] for name in INPUTS]
    if "mask" in given:
        inputs.append(f"mask={given['mask']}")
    if problem.is_causal:
        inputs.append("is_causal=True")
    inputs += [f"{name}={value!r}" for name, value in problem.options.of_scores.items()]
    if call.need_weights:
        inputs.append("need_weights=True")
    leaves = dict.fromkeys(given[name] for name in call.leaves)
    lines = [f"{name}.requires_grad_()" for name in leaves]
    results = f"output_{number}, weights_{number}, lse_{number}"
    called = f"{results} = attention_{call.build}({', '.join(inputs)})"
    lines += in_mode(call.mode, problem.query.device.type, [called])
    if upstream:
        lines.append(f"output_{number}.backward({upstream})")
    return lines


def _import(implementation: Implementation, target: str) -> list[str]:
    """Return the lines that import the implementation, from a loaded module that has it."""
    original = original_of(implementation)
    for name, file, attribute in names_of(original):
        if name not in MAINS:
            return _import_from(name, file or ".", attribute)
    if not target:
        name = implementation.name
        return [f"implementation = ...  # put here the object that was judged as {name!r}"]
    _, target = split_name(target)
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        target = f"{from_here(Path(place).resolve())}:{name}"
    return [
        "from mha.implementations import resolve",
        "",
        f"implementation = resolve({target!r})[0].implementation",
    ]


def _import_from(name: str, file: str, attribute: str) -> list[str]:
    """Return the lines that import an attribute of a module, which need not be in a package."""
    path = Path(file).resolve()
    if "." in name or str(path.parent) in sys.path:
        if attribute == "implementation":
            return [f"from {name} import implementation"]
        return [f"from {name} import {attribute} as implementation"]
    return [
        "import runpy",
        "import sys",
        "",
        path_line(from_here(path.parent)),
        f"implementation = runpy.run_path({from_here(path)!r})[{attribute!r}]",
    ]
