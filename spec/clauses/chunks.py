"""The CHK clause: which keys a query sees in chunks."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CHK-1",
        level="MAY",
        title="A query sees its own chunk",
        statement=(
            "With chunks of c places, a query at place p sees the keys t with floor(t / c) ="
            " floor(p / c), and of these those that mask, causal flag and window allow. The place"
            " of query i is i, or i + S - L, as claimed (`Claims.causal`, `Scores.alignment`); one"
            " before the first key sees none. A chunk that holds all places changes nothing."
        ),
        why=(
            "Llama 4 attends in chunks of 8192 in three of four layers. Chunks that are counted"
            " from another place agree with it up to there, and with nothing beyond."
        ),
        source="Llama 4 reference code; flash-attention 3 (`attention_chunk`)",
        differs=(
            "flash-attention 3 counts chunks from the first key of each item, bottom-right."
            " transformers counts from absolute positions, and without left padding. The"
            " ChunkedCausalMask of JAX's splash kernel is causal too."
        ),
        violation=(
            "`t > p - c`, which is a window of c keys: the first queries of a chunk see keys of the"
            " chunk before."
        ),
        fix=(
            "Compare `t // c` with `p // c`, rounding down; in C, -1 / c is 0, so test p < 0 first."
        ),
    ),
)
