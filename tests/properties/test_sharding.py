"""Sharded attention: ours conform, and a rank that fails is a verdict, never a hang."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from mha.conformance import Case, check
from mha.conformance.cases.reasons import NeedsClaim
from mha.conformance.engine.replay import replay_case
from mha.conformance.faults import ranks
from mha.conformance.faults import registry as faults
from mha.conformance.faults.base import CLAIMS
from mha.conformance.harness.errors import AdapterError
from mha.conformance.harness.session import Session
from mha.conformance.properties.sharding import SHARDED as SHARDED_CASES
from mha.conformance.sharding import group as processes
from mha.conformance.sharding.gathered import Gathered, on_ranks
from mha.conformance.sharding.group import RankError, group
from mha.implementations import (
    ImplementationError,
    context_parallel,
    ring,
    tensor_parallel,
    ulysses,
)
from mha.implementations.adapters.sharded import from_sharded
from mha.implementations.discovery.resolve import Renamed, as_resolved
from mha.spec import Claims, Config, Problem, Rounding, Sharded, Weights, oracle, positions
from mha.spec.directed import allowance
from mha.spec.rounding_graph import rounding_graph
from support.judging import RIGHT, expect_pass, judged
from support.rank_functions import (
    copy_off_in_training,
    die_on_one,
    hang_on_one,
    interrupt,
    parts_stored,
    refuse,
    refuse_gloo,
    refuse_on_one,
    return_dtensor,
    return_lengths_first,
    return_nothing,
)
from support.rank_scripts import run_on_ranks

OURS = {
    "ring": ring.implementation,
    "ring_zigzag": ring.zigzag,
    "ring_striped": ring.striped,
    "ulysses": ulysses.implementation,
    "tensor_parallel": tensor_parallel.implementation,
    "context_parallel": context_parallel.implementation,
    "sequence_parallel": ranks.sequence_parallel,
    "heads_parallel": ranks.heads_parallel,
}
CONFIG = Config(d_model=4, n_heads=2)
WEIGHTS = Weights.random(CONFIG, 0, torch.float32)
SHOULD_RETURN = "should return its context, a torch.Tensor of shape (1, 2, 3, 2)"
SHARDED = Claims(world_sizes={2}, masks=(), causal=None, returns_weights=False, devices={"cpu"})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 3.0)


def build(implementation: Sharded, size: int = 2) -> Any:
    return on_ranks(implementation, size).build(CONFIG, WEIGHTS, dtype=torch.float32, device="cpu")


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", OURS)
def test_ours_conform(name: str) -> None:
    """Recommendations included; on four ranks, `mha check ring --mha-profile thorough` judges."""
    report = judged(OURS[name], "DST", RIGHT, strict=True)
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    waived = {"DST-1"} if name == "context_parallel" else set()
    assert {
        clause
        for clause, status in statuses.items()
        if status not in ("pass", "not_claimed", "waived")
    } == set()
    assert {clause for clause, status in statuses.items() if status == "waived"} == waived
    assert list(statuses.values()).count("pass") >= 6 - len(waived)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ring", torch.bfloat16),
        ("ulysses", torch.float16),
        ("tensor_parallel", torch.float16),
        ("parts_stored", torch.bfloat16),
    ],
)
def test_ours_conform_in_half_precision(name: str, dtype: torch.dtype) -> None:
    ours = {**OURS, "parts_stored": parts_stored}[name]
    expect_pass(ours, "DST-1", "DST-2", dtypes=dtype, strict=True)


def of_parts(stored: bool) -> Rounding:
    return Rounding(
        scores_stored=False,
        weights_stored=False,
        softmax_stored=False,
        scaling_roundings=0,
        log_normaliser=False,
        partials_stored=stored,
        ranks=2,
    )


def test_parts_that_cancel_need_the_bound_of_parts_that_are_stored() -> None:
    """Of an output that is 0, only parts have roundings; so has a context of opposite values."""
    one, two = torch.ones(1, 1), Config(d_model=2, n_heads=2, bias=False)
    x = torch.full((1, 1, 2), 1.0).bfloat16()
    # Heads of 1.01 and -1.01: what each rank adds to the output is off by u_s, and the sum is 0.
    weights = Weights(
        torch.eye(2),
        torch.eye(2),
        torch.diag(torch.tensor([1.0, -1.0])),
        torch.tensor([[1.01, 1.01]] * 2),
    )
    problem = Problem(two, weights.to(torch.bfloat16), x, x, x)
    values = torch.tensor([[[1.01], [-1.01]]]).bfloat16()
    same = Weights(0 * one, 0 * one, one, one).to(torch.bfloat16)
    row = Problem(Config(d_model=1, n_heads=1, bias=False), same, values[:, :1], values, values)
    u = 2.0**-8
    for case in (problem, row):
        loose, strict = (
            oracle(case, Claims(rounding=of_parts(stored))).output for stored in (True, False)
        )
        assert (loose.mid == 0).all()
        added = loose.rad - strict.rad
        assert (added > u).all()
        assert (added < 8 * u).all()


def test_parts_over_ranks_are_places_of_the_rounding_graph() -> None:
    problem = Case(dtype="bfloat16", B=2, n_heads=2, head_dim=8, L=8, S=8).problem()
    for bias in (True, False):
        given = problem if bias else replace(problem, weights=replace(problem.weights, b_o=None))
        graphs = [
            rounding_graph(given, Claims(rounding=of_parts(stored))) for stored in (True, False)
        ]
        loose, strict = (allowance(graph, graphs[0].output) for graph in graphs)
        assert loose.sd > 1.2 * strict.sd
        # What two ranks store of the output, their roundings in the direction of the output.
        graph, w = graphs[0], graphs[0].output
        heads = graph.w_o.unflatten(1, (2, -1)).transpose(0, 1)
        parts = graph.context @ heads.mT
        moved = (parts.bfloat16().double() - parts).sum(1)
        assert abs(float((moved * w).sum())) < loose.threshold


def test_clauses_without_ranks_are_not_claimed_unless_it_has_such_a_form() -> None:
    (alone,) = check(ring.implementation, clauses="SHP-1", dtypes=torch.float32).verdicts
    assert (alone.status, "runs on ranks only" in alone.message) == ("not_claimed", True)
    both = replace(ring.implementation, unsharded=faults.complete)
    (verdict,) = check(both, "quick", clauses="SHP-1", dtypes=torch.float32).verdicts
    assert verdict.status == "pass"


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (refuse, ValueError, "not today"),
        (refuse_gloo, ValueError, "needs nccl, not gloo"),
        (interrupt, RuntimeError, "KeyboardInterrupt: "),
        (return_nothing, TypeError, f"return_nothing {SHOULD_RETURN}, not a NoneType"),
        (return_dtensor, TypeError, f"return_dtensor {SHOULD_RETURN}, not a DTensor"),
        (
            return_lengths_first,
            ValueError,
            f"return_lengths_first {SHOULD_RETURN}, but returned one of (1, 3, 2, 2)",
        ),
        (refuse_on_one, RankError, "rank 0 returned; rank 1 raised ValueError: not here"),
        # A clause finds that too: see below.
        pytest.param(die_on_one, RankError, "rank 1 died with status 3", marks=pytest.mark.slow),
        (hang_on_one, RankError, "rank 0 returned; rank 1 did not end"),
    ],
)
def test_rank_that_fails_is_an_error_of_the_call(
    fn: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, sharded = torch.ones(1, 6, 4), from_sharded(fn, placements=Shard(2), claims=SHARDED)
    attention = build(sharded)
    started = [each.process for each in group.processes]
    monkeypatch.setattr(processes, "TIMEOUT", 3.0)
    with pytest.raises(error) as raised:
        attention(x, x, x)
    assert str(raised.value) == message
    if error is RankError:  # what another rank waits for must not hold it
        assert all(process.poll() is not None for process in started)
        assert not group.processes


def test_copies_of_an_output_that_is_differentiated_are_compared() -> None:
    (verdict,) = check(
        copy_off_in_training, "quick", clauses="DST-2", dtypes=torch.float32
    ).verdicts
    assert verdict.status == "fail"
    assert re.search(r"output_4\[0, \d, 0\] is .*: on rank 1, that of one process", verdict.message)


def test_failing_rank_is_a_verdict_and_the_next_case_has_other_ranks() -> None:
    report = check(
        faults.implementations["Dies"], "quick", clauses=["DST-10", "DST-8"], dtypes=torch.float32
    )
    by_clause = {verdict.clause: verdict for verdict in report.verdicts}
    assert by_clause["DST-10"].status == "fail"
    assert by_clause["DST-10"].message.startswith(
        "the call raised RankError: rank 1 died with status 3"
    )
    assert by_clause["DST-8"].status == "pass"


@pytest.mark.slow
def test_processes_are_replaced_after_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each, DTensor leaves threads behind."""
    monkeypatch.setattr(processes, "MOST_GROUPS", 2)
    group.end()
    used = []
    for implementation in (ring.implementation, ring.zigzag, ring.striped):
        assert build(implementation)(*3 * [torch.ones(1, 2, 4)]).output.shape == (1, 2, 4)
        used.append([member.process.pid for member in group.processes])
    assert used[0] == used[1] != used[2]


def test_failure_is_replayed_on_its_ranks() -> None:
    case = Case(mask="keys", S=3, ranks=2)
    assert replay_case(faults.implementations["MaskCutInOrder"], "DST-5", case).outcome == "FAILS"
    assert replay_case(ring.zigzag, "DST-5", case).outcome == "FIXED"
    replayed = replay_case(ring.zigzag, "DST-5", replace(case, ranks=9))
    assert (replayed.outcome, "not 9" in replayed.message) == ("INAPPLICABLE", True)


def test_more_ranks_than_claimed_are_refused_in_one_line() -> None:
    with pytest.raises(
        ImplementationError, match=r"ring claims \[1, 2, 3, 4\] ranks \(Claims.world_sizes\), not 5"
    ):
        build(ring.implementation, 5)


def test_other_numbers_of_ranks_than_the_usual_ones_are_judged() -> None:
    for claimed, expected in (({2, 4}, (2, 4)), ({1, 3}, (3,)), ({5, 16}, (5,))):
        domain = SHARDED_CASES.within(replace(SHARDED, world_sizes=claimed))
        assert (domain if isinstance(domain, str) else domain.ranks) == expected
    assert SHARDED_CASES.within(replace(SHARDED, world_sizes={1})) == NeedsClaim("world_sizes")


def test_a_renamed_implementation_runs_on_ranks_too() -> None:
    assert isinstance(
        Session(Renamed(ring.implementation, "mine"), Case(ranks=2))
        .built(Case(ranks=2).problem())
        .attention,
        Gathered,
    )


def test_function_that_cannot_be_sent_is_refused_in_one_line() -> None:
    def local(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return query

    with pytest.raises(
        ImplementationError, match="define it, and what it is made of, at the top level of a module"
    ):
        build(from_sharded(local, placements=Shard(2), claims=SHARDED))


def test_file_that_is_no_package_is_found_by_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "mean_on_ranks.py"
    file.write_text(
        "from torch.distributed.tensor.placement_types import Shard\n"
        "from mha.implementations import from_sharded\n"
        "from mha.spec import Claims\n\n"
        "def attend(query, key, value, *, mask, is_causal, mesh):\n"
        "    return query * 0\n\n"
        "claims = Claims(world_sizes={2}, masks=(), causal=None, returns_weights=False)\n"
        "implementation = from_sharded(attend, placements=Shard(2), claims=claims)\n"
    )
    (verdict,) = check(
        f"{file}:implementation", "quick", clauses="DST-1", dtypes=torch.float32
    ).verdicts
    assert (verdict.status, "RankError" in verdict.message) == ("fail", False)
    assert verdict.script
    assert "AssertionError: " in run_on_ranks(verdict.script, tmp_path)


def test_time_in_which_the_judge_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x, waits = build(OURS["ring"]), torch.ones(1, 4, 4), []
    wait = processes.wait

    def stopped_at_first(*arguments: Any) -> list[Any]:
        waits.append(arguments)
        if len(waits) > 1:
            return wait(*arguments)
        sleep(processes.STOPPED + 0.5)
        return []

    monkeypatch.setattr(processes, "TIMEOUT", 0.2)
    monkeypatch.setattr(processes, "wait", stopped_at_first)
    assert attention(x, x, x).output.shape == x.shape
    assert len(waits) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"placements": Shard(1)},
            r"placements must give Shard\(2\), the sequence, or Replicate\(\) to each of",
        ),
        ({"placements": {"query": Shard(2)}}, "to each of query, key, value, output"),
        (
            {
                "placements": {
                    "query": Shard(2),
                    "key": Replicate(),
                    "value": Shard(2),
                    "output": Shard(2),
                }
            },
            "must be the same for query and output, and for key and value",
        ),
        ({"order": "spiral"}, "order must be one of contiguous, zigzag, striped, but is 'spiral'"),
        (
            {"fn": lambda query, key, value: query},
            r"must be callable as <lambda>\(query, key, value, ",
        ),
        (
            {"claims": replace(SHARDED, dropout=True)},
            "claims dropout, which the function is not asked for",
        ),
        (
            {"claims": Claims()},
            r"claims has no world_sizes; claim the numbers of ranks, as world_sizes=\{2\}",
        ),
    ],
)
def test_bad_declarations_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplementationError, match=message) as raised:
        from_sharded(**{"fn": refuse, "placements": Shard(2), "claims": SHARDED, **options})
    assert "\n" not in str(raised.value)


def test_claimed_ranks_need_a_sharded_implementation() -> None:
    with pytest.raises(ImplementationError, match=r"claims ranks .* but has no build_rank"):
        as_resolved(faults.implementation_of(faults.Complete, replace(CLAIMS, world_sizes={2})))
    with pytest.raises(ValueError, match="world_sizes must be a set of positive integers"):
        Claims(world_sizes={0})


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    ("length", "size"), [(0, 2), (1, 2), (5, 2), (8, 2), (7, 3), (3, 4), (16, 4)]
)
def test_every_position_is_on_one_rank(order: Any, length: int, size: int) -> None:
    parts = positions(order, length, size)
    assert len(parts) == size
    assert torch.cat(parts).sort().values.tolist() == list(range(length))


def children(process: int) -> Iterator[str]:
    """Yield the processes that a process has started, and those that they have."""
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            yield child
            yield from children(int(child))


@pytest.mark.mostly_slow(1)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_run_that_ends_early_leaves_no_rank_behind(number: signal.Signals) -> None:
    code = (
        # A background job ignores the signal.
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from mha.conformance.sharding.group import group; group.join((0, 1), 'cpu', 1);"
        " print('ready', flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        started = list(children(running.pid))
        assert len(started) == 2
        running.send_signal(number)
        running.wait(30)
    end = monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in started) and monotonic() < end:
        sleep(0.05)
    assert not any(Path(f"/proc/{each}").exists() for each in started)


def test_refusal_of_the_adapter_is_not_the_implementations() -> None:
    case = Case(ranks=7)
    with pytest.raises(AdapterError, match="not 7"):
        Session(ring.implementation, case)(case.problem())
