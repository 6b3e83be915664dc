"""The clauses of the contract, keyed by id, and their families, in the order of the catalogue."""

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from mha.spec.clauses import (
    accuracy,
    causal,
    composition,
    configuration,
    dropout,
    gradients,
    heads,
    mask_edges,
    masks,
    paths,
    shapes,
    softmax,
    state,
    symmetries,
)
from mha.spec.clauses.clause import Clause, Family, Level

__all__ = ["CLAUSES", "FAMILIES", "Clause", "Family", "Level"]


def _by_id(clauses: Iterable[Clause]) -> Mapping[str, Clause]:
    """Return the clauses keyed by id; raise ValueError if two share one."""
    keyed: dict[str, Clause] = {}
    for clause in clauses:
        if clause.id in keyed:
            raise ValueError(f"two clauses have the id {clause.id}: {keyed[clause.id].title!r} and {clause.title!r}")
        keyed[clause.id] = clause
    return MappingProxyType(keyed)


CLAUSES: Mapping[str, Clause] = _by_id(
    chain(
        configuration.CLAUSES,
        shapes.CLAUSES,
        softmax.CLAUSES,
        masks.CLAUSES,
        mask_edges.CLAUSES,
        causal.CLAUSES,
        paths.CLAUSES,
        heads.CLAUSES,
        symmetries.CLAUSES,
        accuracy.CLAUSES,
        gradients.CLAUSES,
        dropout.CLAUSES,
        state.CLAUSES,
        composition.CLAUSES,
    )
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "CFG": Family("Configuration", "Which sizes and options a module is built with, and which it refuses."),
        "SHP": Family("Shapes", "The shape, dtype, device and memory layout of inputs and results."),
        "SMX": Family("Softmax", "How scores become weights: scaled, and normalised over the keys."),
        "MSK": Family("Masks", "What a mask means: True = may attend, broadcastable to (B, H, L, S)."),
        "CAU": Family("Causality", "No query sees a later key."),
        "PTH": Family("Paths", "One result, whichever code runs: a fast path, a fused kernel, a flag or a mode."),
        "HED": Family("Heads", "Many heads are many single heads, concatenated."),
        "EQV": Family("Symmetries", "Changes of the inputs that change the result in a known way, or not at all."),
        "NUM": Family("Accuracy", "How near to the exact result, in every dtype."),
        "GRD": Family("Gradients", "Gradients of outputs with respect to inputs, weights and masks."),
        "DRP": Family("Dropout", "Dropout on the attention weights, where it is claimed."),
        "STA": Family("State", "A call leaves nothing behind."),
        "CMP": Family("Composition", "The module compiled, exported, transformed by torch.func, or under autocast."),
        "INC": Family("Incremental decoding", "A cache of keys and values that grows token by token."),
        "GQA": Family("Grouped heads", "Fewer heads of keys and values than of queries."),
        "XAT": Family("Other widths", "Keys and values whose width is not that of the model."),
        "DST": Family("Distribution", "One attention, spread over several processes."),
    }
)
