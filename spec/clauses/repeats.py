"""The DET clauses: which bits do not change."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="DET-1",
        level="MAY",
        kind="conduct",
        title="A second call gives the same bits",
        statement=(
            "Two calls with the same inputs give the same bits, on every device, and so do their"
            ' gradients where `Claims.repeats="both"` is claimed.'
        ),
        why=(
            "A training run that cannot be repeated cannot be debugged, and one that has diverged"
            " cannot be told from a broken one."
        ),
        source="flash-attention (`deterministic`), torch.use_deterministic_algorithms",
        differs=(
            "The backward passes of flash-attention add with atomics, in any order, unless"
            " `deterministic=True`."
        ),
        violation="`atomicAdd` of the parts of dQ: their order, and so the last bits, change.",
        fix="Add the parts in a fixed order, in a second pass over a buffer.",
    ),
    Clause(
        id="DET-2",
        level="MAY",
        kind="conduct",
        title="An item does not depend on its batch",
        statement=(
            "The bits of an item do not depend on the number of items, across 32 too, nor on its"
            " place among them, nor on what the others are. With `Claims.batch_invariant` as a"
            " mapping, calls have these arguments, which switch it on."
        ),
        why=(
            "Sampling at temperature 0 gives other texts under load, and the log-probabilities of a"
            " server are not those of the trainer, if splits are chosen by the size of a batch."
        ),
        source=(
            "He et al. 2025, Defeating nondeterminism in LLM inference; known bug:"
            " Dao-AILab/flash-attention, pull request 2450"
        ),
        differs=(
            "FlashInfer needs `fixed_split_size` or `disable_split_kv`, torch's varlen attention"
            " `num_splits=1`. Matrix products of most libraries depend on the batch."
        ),
        violation="`num_splits = 108 // (batch * heads)`: sums of other parts for another batch.",
        fix="Choose tiles and splits by the lengths of an item alone.",
    ),
)
