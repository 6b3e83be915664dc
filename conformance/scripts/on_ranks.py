"""The script of a failure on ranks: a function that each rank runs on its own, and the lines that
start the ranks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.recording import CallStep, DeriveStep
from mha.conformance.harness.session import Session
from mha.implementations.discovery.resolve import original_of
from mha.spec import Problem, Sharded, positions
from mha.spec.problem import INPUTS

# In seconds; a rank that waits for ever would otherwise do so for half an hour.
TIMEOUT = 60
# Which positions a tensor is cut by.
AXES = {"query": "queries", "key": "keys", "value": "keys", "output": "queries"}
# Zeros stay where nothing of the output of a rank depends on an input.
LEAF = "x.requires_grad_().grad = torch.zeros_like(x)"
# Of a rank in a group that is larger than the mesh.
LARGER = (
    "if rank == 0:",
    "    return  # it is in the group, and not in the mesh",
    "rank = mesh.get_local_rank()",
)


@dataclass(frozen=True)
class RankScript:
    """What is different in a script whose calls run on ranks.

    Every rank has all numbers of the case, cuts out its parts, and makes the same assertion, on
    what it has whole or on what has been put together.

    ranks: of the mesh. larger: whether they are the last of a group that has one more. assertion:
    the lines that fail; none where a call raises.
    """

    sharded: Sharded
    ranks: int
    device: str
    larger: bool
    assertion: Sequence[str]

    def function(self, body: Sequence[str]) -> list[str]:
        """Return the lines of a function with this body, and those that start a process for each
        rank.
        """
        size, first, on_cuda = self.ranks + self.larger, int(self.larger), self.device == "cuda"
        backend, timeout = "nccl" if on_cuda else "gloo", f"timeout=timedelta(seconds={TIMEOUT})"
        group = f'"{backend}", store=store, rank=rank, world_size={size}, {timeout}'
        lines = [
            'store = dist.TCPStore("127.0.0.1", port)',
            *(["torch.cuda.set_device(rank)"] if on_cuda else []),
            f"dist.init_process_group({group})",
            f'mesh = DeviceMesh("{self.device}", {list(range(first, size))})',
            *(LARGER if self.larger else []),
            *(line.replace("'cuda:0'", "'cuda'") for line in body),
            "dist.destroy_process_group()",
        ]
        return [
            "",
            "",
            "def run(rank, port):",
            (
                f'    """What each of {size} ranks does."""'
                if size > 1
                else '    """What the only rank does."""'
            ),
            *textwrap.indent("\n".join(lines), "    ").splitlines(),
            "",
            "",
            'if __name__ == "__main__":',
            '    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)',
            f"    torch.multiprocessing.spawn(run, args=(store.port,), nprocs={size})",
        ]

    def call(self, call: CallStep, given: Mapping[str, str], upstream: str) -> list[str]:
        """Return the lines of a call.

        given: the names of its inputs and its mask. upstream: the name of what its output is
        multiplied by for the gradients, if they are wanted.
        """
        number, problem, lines = call.number, call.problem, self._places(call.problem)
        leaves = dict.fromkeys(given[name] for name in call.wanted)
        if leaves:
            lines += [f"for x in [{', '.join(leaves)}]:", f"    {LEAF}"]
        inputs = self._inputs(call, given, lines)
        if problem.mask is not None:
            inputs.append(
                f"mask={given['mask']}{'[..., queries, :]' if self._has_rows(problem) else ''}"
            )
        inputs += ["is_causal=True"] if problem.is_causal else []
        output = "part" if self._is_cut("output") else f"output_{number}"
        called = f"{output}, *_ = attention_{call.build}({', '.join(inputs)})"
        code = MODES[call.mode].code.format(device=self.device)
        lines += [f"with {code}:", f"    {called}"] if code else [called]
        if upstream:
            lines.append(
                f"{output}.backward({upstream}{'[:, queries]' if self._is_cut('output') else ''})"
            )
            lines += self._summed(call, given)
        return lines + self._whole(call, given)

    def _inputs(self, call: CallStep, given: Mapping[str, str], lines: list[str]) -> list[str]:
        """Return the names of a rank's query, key and value, writing the lines that define them.

        Inputs that are one tensor are one on each rank, if they are placed alike.
        """
        parts: dict[str, str] = {}
        for name in filter(self._is_cut, INPUTS):
            parts.setdefault(given[name], name)
        if parts:
            cut = ", ".join(f"{whole}[:, {AXES[name]}]" for whole, name in parts.items())
            lines.append(f"{', '.join(parts.values())} = {cut}")
        whole = self._whole_too(call, given)
        lines += [
            f"{name} = {tensor}.detach().clone().requires_grad_()" for tensor, name in whole.items()
        ]
        return [
            (parts if self._is_cut(name) else whole).get(given[name], given[name])
            for name in INPUTS
        ]

    def _whole_too(self, call: CallStep, given: Mapping[str, str]) -> dict[str, str]:
        """Return inputs that each rank has a part of and, under another name, the whole: both have
        a gradient.
        """
        cut = {given[name] for name in INPUTS if self._is_cut(name)} if call.wanted else set()
        return {
            given[name]: name
            for name in reversed(INPUTS)
            if not self._is_cut(name) and given[name] in cut
        }

    def _places(self, problem: Problem) -> list[str]:
        """Return the line that says which positions a rank has of what is sharded, if anything is."""
        lengths = {"queries": problem.shape[2], "keys": problem.shape[3]}
        used = [
            axis
            for axis in lengths
            if any(AXES[name] == axis and self._is_cut(name) for name in AXES)
        ]
        if len({lengths[axis] for axis in used}) == 1:
            used = [" = ".join(used)]
        order, lines = self.sharded.order, []
        for axis in used:
            length = lengths[axis.split()[0]]
            places = [part.tolist() for part in positions(order, length, self.ranks)]
            lines.append(f"{axis} = {places}[rank]  # the positions of this rank, in {order} order")
        return lines

    def _summed(self, call: CallStep, given: Mapping[str, str]) -> list[str]:
        """Return the lines that add up gradients of which a rank has a part."""
        partial = dict.fromkeys(
            given[name] for name in call.wanted if name == "mask" or self._is_cut(name)
        )
        lines = [
            _added_up(f"{tensor}.grad") for tensor in partial if self._looks_at(f"{tensor}.grad")
        ]
        return lines + [
            f"{tensor}.grad += {name}.grad" for tensor, name in self._whole_too(call, given).items()
        ]

    def _whole(self, call: CallStep, given: Mapping[str, str]) -> list[str]:
        """Return the lines that put an output together, or require its shape; none where it is not
        looked at.
        """
        whole, is_cut = f"output_{call.number}", self._is_cut("output")
        if not self.assertion:
            found, like = (
                ("part", f"{given['query']}[:, queries]") if is_cut else (whole, given["query"])
            )
            return [f"assert {found}.shape == {like}.shape, {found}.shape"]
        if not is_cut or not self._looks_at(whole):
            return []
        return [
            f"{whole} = part.new_zeros({given['query']}.shape)",
            f"{whole}[:, queries] = part.detach()",
            _added_up(whole),
        ]

    def _looks_at(self, code: str) -> bool:
        return any(code in line for line in self.assertion)

    def _is_cut(self, name: str) -> bool:
        return bool(self.sharded.placements[name].is_shard())

    def _has_rows(self, problem: Problem) -> bool:
        mask = problem.mask
        return mask is not None and mask.ndim > 1 and mask.shape[-2] > 1 and self._is_cut("query")


def _added_up(tensor: str) -> str:
    """Return the line that puts together what each rank has in its part, beside zeros."""
    return f"dist.all_reduce({tensor}, group=mesh.get_group())  # what all ranks have, added up"


def rank_script(session: Session, violation: Violation) -> RankScript | None:
    """Return what is different in the script of a session on ranks; None if it is not on ranks."""
    sharded, case = original_of(session.implementation), session.case
    if not case.ranks or not isinstance(sharded, Sharded):
        return None
    larger = any(isinstance(step, DeriveStep) for step in session.steps)
    return RankScript(sharded, case.ranks, case.device, larger, violation.assertion)
