"""What runs in the process of a rank: it joins a group, builds an attention, and calls it."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are in its documentation
from torch.distributed.device_mesh import DeviceMesh

from mha.spec import Config, Differentiable, Options, Output, Weights

# Modules that a rank keeps, the last ones that were built.
KEPT = 8
GRAD_MODES: Mapping[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass(frozen=True)
class Join:
    """Join a group.

    number: of the group, a new one each time.
    port: of the store.
    members: the ranks of the mesh.
    """

    number: int
    port: int
    rank: int
    world_size: int
    members: tuple[int, ...]
    device: str
    timeout: float


@dataclass(frozen=True)
class Build:
    """Build an attention.

    code: a pickled `Sharded`.
    files: of the modules that it is in, by their names.
    """

    number: int
    code: bytes
    files: Mapping[str, str]
    path: tuple[str, ...]
    config: Config
    weights: Weights
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Call:
    """Call an attention with this rank's parts.

    options: without the mask, which is one of the tensors.
    wanted: the tensors that require a gradient, by name.
    """

    number: int
    tensors: Mapping[str, Tensor | None]
    options: Options
    training: bool
    grad_mode: str
    wanted: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Differentiate:
    """Differentiate the last call of an attention.

    weights: whether to return their gradients as well.
    """

    number: int
    upstream: Tensor
    weights: bool


@dataclass(frozen=True)
class Raised:
    """The answer where an exception was raised."""

    error: Exception


class Rank:
    """The state of a rank: its mesh, and the modules with the graphs of their last calls."""

    def __init__(self) -> None:
        self.mesh: DeviceMesh | None = None
        self.modules: dict[int, Any] = {}
        self.graphs: dict[int, tuple[dict[str, Tensor], Tensor]] = {}

    def answer(self, request: object) -> tuple[object] | Raised:
        """Do what is asked; return the result in a tuple, or what was raised."""
        try:
            match request:
                case Join():
                    self.join(request)
                    return (None,)
                case Build():
                    self.build(request)
                    return (None,)
                case Call():
                    return (self.call(request),)
                case Differentiate():
                    return (self.differentiate(request),)
        except BaseException as error:
            return Raised(_sendable(error))
        raise AssertionError(request)

    def join(self, request: Join) -> None:
        """Leave the group, if this rank is in one, and join another."""
        self.modules.clear()
        self.graphs.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        store = TCPStore("127.0.0.1", request.port, is_master=False)
        cuda = request.device == "cuda"
        if cuda:
            torch.cuda.set_device(request.rank)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore(str(request.number), store),
            rank=request.rank,
            world_size=request.world_size,
            timeout=timedelta(seconds=request.timeout),
        )
        if len(request.members) == request.world_size:
            every = dist.distributed_c10d._get_default_group()
            self.mesh = DeviceMesh.from_group(every, request.device)
        else:
            self.mesh = DeviceMesh(request.device, list(request.members))

    def build(self, request: Build) -> None:
        """Build the attention; the oldest one is given up."""
        sys.path[:] = request.path
        for name, file in request.files.items():
            _ensure_importable(name, file)
        implementation = pickle.loads(request.code)
        weights = request.weights.to(request.dtype, request.device)
        self.modules[request.number] = implementation.build_rank(
            request.config, weights, mesh=self.mesh, dtype=request.dtype, device=request.device
        )
        for number in sorted(self.modules)[:-KEPT]:
            del self.modules[number]
            self.graphs.pop(number, None)

    def call(self, request: Call) -> Tensor:
        """Return this rank's output, without history."""
        module = self.modules[request.number]
        _ = module.train() if request.training else module.eval()
        torch.manual_seed(request.seed)
        with GRAD_MODES[request.grad_mode]():
            given = dict(request.tensors)
            # One tensor is one leaf, under the first of its names.
            leaves = dict[str, Tensor]()
            for name in request.wanted:
                leaf = given[name]
                assert leaf is not None
                if not any(leaf is other for other in leaves.values()):
                    leaves[name] = leaf.requires_grad_()
            options = request.options.change(mask=given["mask"])
            returned = module(given["query"], given["key"], given["value"], **options.arguments)
            output = returned.output if isinstance(returned, Output) else returned
            if type(output) is not Tensor:
                # A collective of torch returns a tensor that waits for it when it is first used.
                output = output.clone()
            if type(output) is not Tensor:
                raise TypeError(
                    "a rank should return its part as a torch.Tensor, not as"
                    f" {type(output).__name__}"
                )
        self.graphs[request.number] = leaves, output
        return output.detach()

    def differentiate(self, request: Differentiate) -> dict[str, Tensor]:
        """Return the gradients of the inputs, and of the weights if they are wanted, by name."""
        module, (leaves, output) = self.modules[request.number], self.graphs.pop(request.number)
        if isinstance(module, torch.nn.Module):
            module.zero_grad(set_to_none=True)
        if output.requires_grad:
            output.backward(request.upstream)
        found = dict[str, Tensor]()
        for name, leaf in leaves.items():
            found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if request.weights:
            attention: Differentiable = module
            found |= attention.weight_gradients()
        return found


def _sendable(error: BaseException) -> Exception:
    """Return an exception that can be pickled, with the first line of the message."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error  # type: ignore[return-value]  # it was an Exception
    except Exception:
        pass
    lines = str(error).strip().splitlines() or [""]
    return RuntimeError(f"{type(error).__name__}: {lines[0]}")


def _ensure_importable(name: str, file: str) -> None:
    """Load a module from its file unless it can be imported, or is loaded already.

    `__main__` is never run as such.
    """
    if name in sys.modules and name != "__main__":
        return
    if name != "__main__":
        with suppress(ModuleNotFoundError):  # the package that it would be in
            if importlib.util.find_spec(name) is not None:
                return
    loaded = "__mp_main__" if name == "__main__" else name
    if loaded not in sys.modules:
        spec = importlib.util.spec_from_file_location(loaded, file)
        assert spec is not None
        assert spec.loader is not None
        sys.path.append(os.path.dirname(file))
        sys.modules[loaded] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[loaded])
    sys.modules[name] = sys.modules[loaded]


def main(descriptor: int) -> None:
    """Answer what comes through a connection, until the other side closes it, or ends."""
    os.dup2(2, 1)  # what an implementation prints is no result of the judge
    torch.set_num_threads(1)
    # As in the judge's own process; and DTensor logs a traceback where it refuses a shape.
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.CRITICAL)  # type: ignore[attr-defined]  # it is in its documentation
    connection, rank = Connection(descriptor), Rank()
    requests: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(connection, requests), daemon=True).start()
    while True:
        connection.send_bytes(pickle.dumps(rank.answer(pickle.loads(requests.get()))))


def _read(connection: Connection, requests: SimpleQueue[bytes]) -> None:
    """Queue what comes; at its end, end the process, even one that waits for another rank."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
