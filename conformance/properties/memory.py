"""MEM-1: memory that grows with L + S."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, Domain
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.memory import peak_memory
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.implementations.adapters.calling import CallByName
from mha.implementations.discovery.resolve import original_of
from mha.spec.claims import smallest_from

# The second length is four times the first one. What grows with it takes four times the memory,
# what grows with its square sixteen times; with the inputs of heads as narrow as these, the scores
# are most of it.
LENGTHS = (512, 2048)
MOST_GROWTH = 6.0
HEADS, WIDTH = 2, 16
KEYS_ONLY = Domain(
    masks=("none", "padding"),
    causal=BOTH,
    inputs=("cross",),
    values=("normal",),
    layouts=DENSE,
    modes=("eval",),
    need_weights=(False,),
    dtypes=BOUNDED,
)


@property_of(
    "MEM-1",
    KEYS_ONLY,
    needs="memory=linear",
    requires="HED-1",
    must_reject=("stores_scores",),
    within_bounds=True,
    max_cases=3,
)
def memory_grows_with_the_lengths(session: Session, case: Case) -> None:
    """At four times the length, a forward and a backward pass take at most six times the memory."""
    assume(
        not _expands_masks(session, case),
        "the masks of its calls have numbers for each query and key",
    )
    short, long = (_peak(session, replace(case, L=length, S=length)) for length in LENGTHS)
    passes = "a forward and a backward pass" if session.claims.gradients else "a forward pass"
    message = (
        f"{passes} at L = S = {LENGTHS[1]} takes {long / short:.1f} times the memory of L = S ="
        f" {LENGTHS[0]} ({_mebibytes(long)} instead of {_mebibytes(short)}), so it grows with L * S"
    )
    expect(long <= MOST_GROWTH * short, message)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _expands_masks(session: Session, case: Case) -> bool:
    """Return whether the adapter makes masks (L, S), whose memory is not the attention's."""
    call = getattr(original_of(session.implementation), "call", None)
    if not isinstance(call, CallByName):
        return False
    masks = call.masks
    if masks.required or masks.causal_by_default:
        return True
    of_queries_and_keys = masks.shape is not None and {"l", "s"} <= set(masks.shape)
    return case.mask != "none" and of_queries_and_keys


def _peak(session: Session, case: Case) -> int:
    """Return the bytes that a warm call and its backward pass take beyond their inputs."""
    sizes = session.claims.sizes
    n_heads = smallest_from(sizes.n_heads or {HEADS}, HEADS)
    problem = replace(case, B=1, n_heads=n_heads, head_dim=sizes.fit_head_dim(WIDTH)).problem()
    upstream = session.upstream(problem)
    leaves = problem.map_inputs(leaf_of)

    def run() -> None:
        output = session.forward(leaves)
        if session.claims.gradients:
            with guarded("backward()"):
                differentiate(output, upstream)

    run()
    return peak_memory(run, session.case.device)
