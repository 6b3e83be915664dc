"""`judge_output`: is this the attention of these tensors? A pure function on their own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call, blocks
from mha.conformance.embedded.causes import cause_of
from mha.conformance.embedded.comparing import Tally
from mha.conformance.embedded.layouts import ROWS, Layout
from mha.conformance.embedded.roundings import small_defect
from mha.conformance.embedded.undisturbed import undisturbed
from mha.conformance.embedded.verdict import OutputVerdict
from mha.spec.claims import Claims
from mha.spec.dtypes import traits_of
from mha.spec.scores import Lse, Options


def judge_output(  # noqa: PLR0913  the options, each by name
    inputs: Sequence[Tensor] | Mapping[str, Tensor],
    output: object,
    options: Options | Mapping[str, Any] | None = None,
    *,
    claims: Claims | None = None,
    layout: str = "b h l d",
    heads: int | None = None,
    valid: Tensor | None = None,
    most_rows: int | None = None,
    directed: bool | None = None,
) -> OutputVerdict:
    """Judge what a kernel returned for given tensors against the oracle and its error bound.

    It is a pure function: it keeps and prints nothing, and changes neither its arguments nor
    torch's settings. It computes in float64 on the device of the tensors, some rows at a time;
    beside them it needs about 300 MiB, or 120 bytes for each number of the keys and values of one
    head if that is more.

    inputs: query, key and value, or a mapping with these names, on one device: (B, H, L, d_k),
        (B, H_kv, S, d_k) and (B, H_kv, S, d_v), in `layout`.
    output: the context in the layout of the query, or a pair of it and of the log-sum-exp, in the
        layout, base and dtype that `Claims.lse` says, by default (B, H, L), e and float32.
    options: what the call said beside the tensors, as `mha.spec.Options` or a dict of its fields.
    claims: what is claimed of the kernel: the alignment of causal mask and window
        (`Claims.causal`, `Scores.alignment`), the result of empty rows, the place of the softcap,
        and where it rounds. By default any option of `Options` may be given, empty rows are
        zeros, and rounding is the loosest that a correct kernel may have.
    layout: the axes of the tensors, as for `from_kernel`; those of the context follow an arrow if
        they are others.
    heads: the number of query heads, where the layout has them in an axis with others.
    valid: boolean (B, L), the queries whose result is defined; all by default.
    most_rows: judge at most so many queries of each head, evenly spread; all by default.
    directed: in half precision, also look for a small defect that explains the errors better than
        rounding does; by default on the CPU, and elsewhere only for a gross one.

    Raises ValueError for inputs and options that make no call.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> judge_output((q, k, v), right, {"is_causal": True}).ok
    True
    >>> judge_output((q, k, v), right).cause
    'the causal mask was applied, though none was asked for'
    """
    of_inputs, _, of_context = layout.partition("->")
    call = Call.of(inputs, options, claims, of_inputs, heads)
    with undisturbed(call.query.device.type):
        found = _results(call, output, Layout.read(of_context.strip() or of_inputs))
        if isinstance(found, str):
            return OutputVerdict(refused=found)
        return _judged(call, found, valid, most_rows, directed)


def _results(call: Call, output: object, axes: Layout) -> dict[str, Tensor] | str:
    """Return context and log-sum-exp with the axes of the contract, or why they are none."""
    parts = list(output) if isinstance(output, (tuple, list)) else [output]
    names = ("context", "lse")
    if not 1 <= len(parts) <= len(names):
        return f"{len(parts)} results, but they must be the context and perhaps the log-sum-exp"
    found: dict[str, Tensor] = {}
    batch, heads, queries, width = call.context_shape()
    sizes = {"b": batch, "h": heads, "d": width}
    declared = call.claims.lse or Lse()
    layouts = {"context": axes, "lse": Layout.read(declared.axes, ROWS)}
    dtypes = {
        "context": (call.query.dtype,),
        "lse": declared.dtypes_for(call.query.dtype),
    }
    shapes = {"context": call.context_shape(), "lse": (batch, heads, queries)}
    for name, part in zip(names, parts, strict=False):
        if part is None and name == "lse":
            continue
        problem = _not_a_result(part, dtypes[name], call.query.device)
        if problem:
            return f"the {name} {problem}"
        try:
            found[name] = layouts[name].to_contract(part, sizes)  # type: ignore[arg-type]  # it is one
        except ValueError as error:
            return f"the {name} {error}"
        if found[name].shape != shapes[name]:
            return (
                f"the {name} has the shape {tuple(found[name].shape)}, but should have"
                f" {shapes[name]}"
            )
    return found


def _not_a_result(part: object, dtypes: tuple[torch.dtype, ...], device: torch.device) -> str:
    """Return why this is no tensor of these dtypes on a device, or ""."""
    if not isinstance(part, Tensor):
        return f"is {type(part).__name__}, not a tensor"
    if type(part) not in (Tensor, torch.nn.Parameter) or part.layout is not torch.strided:
        return f"is a {type(part).__name__} of layout {part.layout}, not a plain tensor"
    if part.dtype not in dtypes:
        return f"has the dtype {part.dtype}, but should have {dtypes[0]}"
    if part.device != device:
        return f"is on {part.device}, but the query on {device}"
    return ""


def _judged(
    call: Call,
    results: Mapping[str, Tensor],
    valid: Tensor | None,
    most_rows: int | None,
    directed: bool | None,
) -> OutputVerdict:
    """Compare the results with the oracle, and look for what is wrong with them."""
    tallies = _compared(call, results, valid, _spread(call.rows, most_rows))
    compared = tuple(tally.done() for tally in tallies)
    defect = ""
    if directed is not False and traits_of(call.query.dtype).half and not compared[0].nans:
        # A GPU may round in more places.
        gross = directed is None and call.query.device.type != "cpu"
        defect = small_defect(call, results["context"], valid, gross=gross)
    verdict = OutputVerdict(results=compared, directed=defect)
    if verdict.ok:
        return verdict
    places = list[tuple[int, ...]]()
    for tally in tallies:
        places += tally.wrong_rows
    return replace(verdict, cause=cause_of(call, results, places))


def _compared(
    call: Call, results: Mapping[str, Tensor], valid: Tensor | None, rows: Tensor
) -> list[Tally]:
    """Compare these rows of the results with the oracle."""
    tallies = {name: Tally(name, call.group) for name in results}
    parts = {name: call.of_groups(result) for name, result in results.items()}
    for block in blocks(call, rows):
        of_block = None if valid is None else valid[block.items][:, block.rows]
        for name, tally in tallies.items():
            own = parts[name][block.items, block.heads, block.group][:, :, :, block.rows]
            tally.add(block, own, getattr(block, name), of_block)
    return list(tallies.values())


def _spread(rows: Tensor, most: int | None) -> Tensor:
    """Return at most so many of the rows, evenly spread, the first and the last among them."""
    if most is None or len(rows) <= most:
        return rows
    places = torch.arange(most, device=rows.device) * (len(rows) - 1) // max(1, most - 1)
    return rows[places]
