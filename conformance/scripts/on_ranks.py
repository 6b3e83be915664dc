"""The script of a failure on ranks: a function that each rank runs, and what starts the ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha.conformance.harness.errors import Violation
from mha.conformance.harness.recording import CallStep, DeriveStep
from mha.conformance.harness.session import Session
from mha.conformance.scripts.literals import in_mode
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

    ranks: of the mesh.
    larger: whether they are the last of a group that has one more.
    assertion: the lines that fail; none where a call raises.
    """

    sharded: Sharded
    ranks: int
    device: str
    larger: bool
    assertion: Sequence[str]

    def function(self, body: Sequence[str]) -> list[str]:
        """Return the lines of a function with this body, and of a process for each rank."""
        size, first, on_cuda = self.ranks + self.larger, int(self.larger), self.device == "cuda"
        backend, timeout = "nccl" if on_cuda else "gloo", f"timeout=timedelta(seconds={TIMEOUT})"
        group = f'"{backend}", store=store, rank=rank, world_size={size}, {timeout}'
        lines = ['store = dist.TCPStore("127.0.0.1", port)']
        if on_cuda:
            lines.append("torch.cuda.set_device(rank)")
        lines.append(f"dist.init_process_group({group})")
        lines.append(f'mesh = DeviceMesh("{self.device}", {list(range(first, size))})')
        if self.larger:
            lines += LARGER
        lines += [line.replace("'cuda:0'", "'cuda'") for line in body]
        lines.append("dist.destroy_process_group()")
        whose = f"each of {size} ranks" if size > 1 else "the only rank"
        return [
            "",
            "",
            "def run(rank, port):",
            f'    """What {whose} does."""',
            *textwrap.indent("\n".join(lines), "    ").splitlines(),
            "",
            "",
            'if __name__ == "__main__":',
            '    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)',
            f"    torch.multiprocessing.spawn(run, args=(store.port,), nprocs={size})",
        ]

    def call(self, call: CallStep, given: Mapping[str, str], upstream: str) -> list[str]:
        """Return the lines of a call.

        given: the names of its inputs and its mask.
        upstream: the name of the gradient of its output, if gradients are wanted.
        """
        number, problem, lines = call.number, call.problem, self._places(call.problem)
        leaves = dict.fromkeys(given[name] for name in call.wanted)
        if leaves:
            lines += [f"for x in [{', '.join(leaves)}]:", f"    {LEAF}"]
        inputs = self._inputs(call, given, lines)
        if problem.mask is not None:
            mask = f"mask={given['mask']}"
            if self._has_rows(problem):
                mask += "[..., queries, :]"
            inputs.append(mask)
        if problem.is_causal:
            inputs.append("is_causal=True")
        output, gradient = f"output_{number}", upstream
        if self._is_cut("output"):
            output, gradient = "part", f"{upstream}[:, queries]"
        called = f"{output}, *_ = attention_{call.build}({', '.join(inputs)})"
        lines += in_mode(call.mode, self.device, [called])
        if upstream:
            lines.append(f"{output}.backward({gradient})")
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
        for tensor, name in whole.items():
            lines.append(f"{name} = {tensor}.detach().clone().requires_grad_()")
        names = []
        for name in INPUTS:
            known = parts if self._is_cut(name) else whole
            names.append(known.get(given[name], given[name]))
        return names

    def _whole_too(self, call: CallStep, given: Mapping[str, str]) -> dict[str, str]:
        """Return inputs that each rank has in part and, by another name, as a whole.

        Both have a gradient.
        """
        if not call.wanted:
            return {}
        cut = {given[name] for name in INPUTS if self._is_cut(name)}
        whole = [name for name in INPUTS if not self._is_cut(name) and given[name] in cut]
        return {given[name]: name for name in reversed(whole)}

    def _places(self, problem: Problem) -> list[str]:
        """Return the lines that say which positions a rank has of each axis that is sharded."""
        cut = {axis for name, axis in AXES.items() if self._is_cut(name)}
        lengths = {"queries": problem.shape[2], "keys": problem.shape[3]}
        used = {axis: length for axis, length in lengths.items() if axis in cut}
        if len(used) == 2 and len(set(used.values())) == 1:
            used = {"queries = keys": used["keys"]}
        order, lines = self.sharded.order, []
        for axis, length in used.items():
            places = [part.tolist() for part in positions(order, length, self.ranks)]
            lines.append(f"{axis} = {places}[rank]  # the positions of this rank, in {order} order")
        return lines

    def _summed(self, call: CallStep, given: Mapping[str, str]) -> list[str]:
        """Return the lines that add up gradients of which a rank has a part."""
        partial = [name for name in call.wanted if name == "mask" or self._is_cut(name)]
        lines = []
        for tensor in dict.fromkeys(given[name] for name in partial):
            if self._looks_at(f"{tensor}.grad"):
                lines.append(_added_up(f"{tensor}.grad"))
        for tensor, name in self._whole_too(call, given).items():
            lines.append(f"{tensor}.grad += {name}.grad")
        return lines

    def _whole(self, call: CallStep, given: Mapping[str, str]) -> list[str]:
        """Return the lines that put an output together, or require its shape, if anything does."""
        whole, is_cut = f"output_{call.number}", self._is_cut("output")
        if not self.assertion:
            found, like = whole, given["query"]
            if is_cut:
                found, like = "part", f"{like}[:, queries]"
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
