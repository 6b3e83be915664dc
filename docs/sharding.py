"""Print the tables of docs/sharding.md: our sharded implementations, their faults, and PyTorch's
own test on these.

PyTorch's test of context parallelism (test/distributed/tensor/test_attention.py) draws query, key
and value with `torch.rand`, differentiates `out.sum()`, and compares with tolerances of 1e-3 and
8e-3 times the number of ranks in bfloat16. Here these inputs, this loss and these tolerances are
applied in float32, through projections that are the identity.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from time import perf_counter

import torch

from mha.conformance import check, settings
from mha.conformance.engine import judge
from mha.conformance.faults import ranks
from mha.conformance.faults.registry import FAULTS
from mha.conformance.sharding import group as processes
from mha.conformance.sharding.gathered import on_ranks
from mha.conformance.sharding.group import group
from mha.implementations import context_parallel, ring, tensor_parallel, ulysses
from mha.spec import CLAUSES, Config, Implementation, Weights

OURS = (
    ring.implementation,
    ring.zigzag,
    ring.striped,
    ulysses.implementation,
    tensor_parallel.implementation,
    context_parallel.implementation,
)
CLAUSE_IDS = [clause for clause in CLAUSES if clause.startswith("DST")]
MARKS = {"pass": "+", "fail": "**fails**", "waived": "waived", "not_claimed": ""}


def passes_pytorchs_test(implementation: Implementation, size: int = 2) -> bool:
    """Return whether an implementation passes with the inputs, the loss and the tolerances of
    PyTorch's test.
    """
    heads, width, tokens = 8, 32, 64 * size
    config, eye = Config(heads * width, heads, bias=False), torch.eye(heads * width)
    for is_causal in (False, True) if implementation.claims.causal else (False,):
        torch.manual_seed(10)
        drawn = [torch.rand(8, heads, tokens, width).transpose(1, 2).flatten(2) for _ in range(3)]
        leaves = [x.clone().requires_grad_() for x in drawn]
        own = [x.clone().requires_grad_() for x in drawn]
        q, k, v = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in leaves)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        expected = expected.transpose(1, 2).flatten(2)
        expected.sum().backward()
        try:
            weights = Weights(eye, eye, eye, eye)
            attention = on_ranks(implementation, size).build(
                config, weights, dtype=torch.float32, device="cpu"
            )
            actual = attention(*own, is_causal=is_causal).output
            actual.sum().backward()
        except Exception:
            return False
        if not torch.allclose(actual, expected, atol=1e-3 * size):
            return False
        for x, y in zip(own, leaves, strict=True):
            if not torch.allclose(x.grad, y.grad, atol=8e-3 * size):
                return False
    return True


def ours() -> None:
    """Print the verdicts on our implementations, on two ranks, and on two, three and four."""
    print("| implementation | ranks |", " | ".join(CLAUSE_IDS), "| cases | seconds |")
    print("|---" * (len(CLAUSE_IDS) + 4) + "|")
    quick = settings.PROFILES["quick"]
    for most, named in ((2, "2"), (4, "2 to 4")):
        settings.PROFILES["quick"] = replace(quick, ranks=most)
        for implementation in OURS:
            group.join(tuple(range(most)), "cpu", None)  # started before the time is taken
            start = perf_counter()
            verdicts = check(
                implementation, "quick", clauses="DST", dtypes="float32", strict=True
            ).verdicts
            seconds = perf_counter() - start
            marks = " | ".join(MARKS.get(verdict.status, verdict.status) for verdict in verdicts)
            cases = sum(verdict.examples for verdict in verdicts)
            print(
                f"| `{implementation.name}` | {named} | {marks} | {cases} | {seconds:.0f} |",
                flush=True,
            )
    settings.PROFILES["quick"] = quick


def faults() -> None:
    """Print which clauses catch each fault, and whether PyTorch's test would."""
    print("| fault | defect | must be caught by | caught by | cases | PyTorch's test |")
    print("|---|---|---|---|---|---|")
    known = {
        fault.name: fault
        for fault in FAULTS
        if fault.clause in CLAUSE_IDS and fault.dtype == "float32"
    }
    for base in (ranks.sequence_parallel, ranks.heads_parallel):
        print(
            f"| none (`{base.name}`) | | | | |"
            f" {'passes' if passes_pytorchs_test(base) else 'fails'} |"
        )
    for name, fault in known.items():
        verdicts = check(
            fault.implementation, "quick", clauses="DST", dtypes="float32", strict=True
        ).verdicts
        caught = {
            verdict.clause: verdict.cases_to_failure
            for verdict in verdicts
            if verdict.status == "fail"
        }
        others = ", ".join(clause.removeprefix("DST-") for clause in caught)
        verdict = "passes" if passes_pytorchs_test(fault.implementation) else "fails"
        print(
            f"| {name} | {fault.defect} | {fault.clause} | {others} | {caught.get(fault.clause)} |"
            f" {verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    judge.diagnose = judge.first_wrong_step = lambda *_: ""  # type: ignore[assignment]  # neither is looked at
    processes.TIMEOUT, processes.GRACE = 15.0, 3.0
    start = perf_counter()
    group.join((0, 1), "cpu", None)
    print(f"two ranks start in {perf_counter() - start:.1f} s\n")
    for part in sys.argv[1:] or ("ours", "faults"):
        {"ours": ours, "faults": faults}[part]()
        print()
