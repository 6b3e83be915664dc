"""The MEM clause: how memory grows."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MEM-1",
        level="MAY",
        kind="conduct",
        title="Memory grows with L + S",
        statement=(
            "Beyond inputs and outputs, the memory of a forward and a backward pass grows with L +"
            " S, not with L * S: without a mask, causal, and with a mask of keys, as far as they"
            " are claimed."
        ),
        why=(
            "A kernel that never stores the scores is chosen for contexts which do not fit"
            " otherwise. One mask, or the backward pass, that stores them after all ends the job at"
            " the first long sequence."
        ),
        source="Dao et al. 2022, FlashAttention, theorem 2; known bug: tabfm#80",
        differs=(
            "F.scaled_dot_product_attention falls back to a formula that stores the scores for"
            " masks, dtypes and sizes that none of its kernels takes."
        ),
        violation=(
            "A mask of keys that is expanded to (B, H, L, S) for a kernel that takes no other."
        ),
        fix=(
            "Apply masks tile by tile, and compute the scores again in the backward pass; or do not"
            " claim `memory`."
        ),
    ),
)
