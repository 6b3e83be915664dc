"""The clauses of the contract and their families, in order.

CLAUSES: every clause by its id, such as "MSK-1". VERSIONS: those of the contract, the latest one
last. FAMILIES: what each family of clauses is about, by its letters. KINDS: what each kind of
clause asks for.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from mha.spec.clauses import (
    accuracy,
    alibi,
    caps,
    causal,
    chunks,
    composition,
    configuration,
    decoding,
    dropout,
    effects,
    gradients,
    heads,
    lengths,
    lse,
    masks,
    masks_of_numbers,
    memory,
    packing,
    paths,
    positions,
    repeats,
    scores,
    shapes,
    sharding,
    sinks,
    softmax,
    state,
    symmetries,
    variants,
    windows,
)
from mha.spec.clauses.clause import Clause, Family, Kind, Level

__all__ = ["CLAUSES", "FAMILIES", "KINDS", "VERSIONS", "Clause", "Family", "Kind", "Level"]


def _by_id(clauses: Iterable[Clause]) -> Mapping[str, Clause]:
    """Return the clauses keyed by id; raise ValueError if two have the same id."""
    keyed: dict[str, Clause] = {}
    for clause in clauses:
        if clause.id in keyed:
            raise ValueError(
                f"two clauses have the id {clause.id}: {keyed[clause.id].title!r} and"
                f" {clause.title!r}"
            )
        keyed[clause.id] = clause
    return MappingProxyType(keyed)


CLAUSES: Mapping[str, Clause] = _by_id(
    chain(
        configuration.CLAUSES,
        shapes.CLAUSES,
        softmax.CLAUSES,
        masks.CLAUSES,
        masks_of_numbers.CLAUSES,
        causal.CLAUSES,
        paths.CLAUSES,
        heads.CLAUSES,
        symmetries.CLAUSES,
        accuracy.CLAUSES,
        gradients.CLAUSES,
        dropout.CLAUSES,
        state.CLAUSES,
        composition.CLAUSES,
        decoding.CLAUSES,
        variants.CLAUSES,
        scores.CLAUSES,
        windows.CLAUSES,
        chunks.CLAUSES,
        caps.CLAUSES,
        sinks.CLAUSES,
        alibi.CLAUSES,
        positions.CLAUSES,
        lengths.CLAUSES,
        packing.CLAUSES,
        repeats.CLAUSES,
        effects.CLAUSES,
        lse.CLAUSES,
        memory.CLAUSES,
        sharding.CLAUSES,
    )
)

VERSIONS: tuple[str, ...] = tuple(
    sorted(
        {clause.since for clause in CLAUSES.values()},
        key=lambda version: [*map(int, version.split("."))],
    )
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "CFG": Family(
            "Configuration", "Which sizes and options a module accepts, and which it rejects."
        ),
        "SHP": Family(
            "Shapes", "The shape, dtype, device and memory layout of inputs and results."
        ),
        "SMX": Family(
            "Softmax", "How scores become weights: scaled, and normalised over the keys."
        ),
        "MSK": Family(
            "Masks", "What a mask means: True = may attend, broadcastable to (B, H, L, S)."
        ),
        "CAU": Family("Causality", "No query sees a later key."),
        "PTH": Family(
            "Code paths",
            "One result, whichever code runs: a fast path, a fused kernel, a flag or a mode.",
        ),
        "HED": Family("Heads", "Multi-head attention is several single heads, concatenated."),
        "EQV": Family(
            "Symmetries",
            "Changes to the inputs that change the result in a known way, or not at all.",
        ),
        "NUM": Family("Accuracy", "How close results are to the exact ones, in every dtype."),
        "GRD": Family(
            "Gradients", "Gradients of outputs with respect to inputs, weights and masks."
        ),
        "DRP": Family(
            "Dropout", "Dropout of the attention weights or of the output, where claimed."
        ),
        "STA": Family(
            "State",
            "A call has no side effects: on its arguments, on other calls, or on global state.",
        ),
        "CMP": Family(
            "Composition",
            "The module in the transformations and modes of torch, such as compilation and"
            " autocast.",
        ),
        "INC": Family(
            "Incremental decoding",
            "Decoding with a cache of keys and values that grows token by token.",
        ),
        "GQA": Family("Grouped heads", "Fewer key/value heads than query heads."),
        "XAT": Family(
            "Key and value widths", "Keys and values whose width differs from that of the model."
        ),
        "VAL": Family("Width of values", "Values whose heads have a width of their own."),
        "SCL": Family("Scale", "A scale of the scores that a call gives."),
        "WIN": Family("Windows", "Which keys a window lets a query see."),
        "CHK": Family("Chunks", "Attention within chunks of places."),
        "CAP": Family("Softcap", "Scores that are capped by a hyperbolic tangent."),
        "SNK": Family(
            "Sinks", "A sink of each head, which takes a part of the weight of each row."
        ),
        "ALB": Family("ALiBi", "A bias that grows with the distance of a key."),
        "ROT": Family("Rotary positions", "Queries and keys that are rotated by their positions."),
        "QKN": Family("Norms of queries and keys", "Queries and keys that are divided by a norm."),
        "LEN": Family("Lengths", "How many keys and queries each item of a dense batch has."),
        "PAK": Family("Packing", "Sequences that are packed one after another."),
        "DET": Family("Bits", "Which bits do not change from call to call, and with a batch."),
        "EFF": Family("Effect", "What a call says changes the result."),
        "LSE": Family(
            "Log-sum-exp", "The log-sum-exp of the scores, which a call returns beside the context."
        ),
        "MEM": Family("Memory", "How much memory a call takes beyond its inputs and outputs."),
        "DST": Family("Sharded attention", "One attention computed by several processes."),
    }
)

KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "answers": "a valid call returns the correct result.",
        "conduct": (
            "a call has no side effects, and agrees with itself when it is repeated, compiled or"
            " transformed."
        ),
        "refusals": "invalid input is refused.",
    }
)
