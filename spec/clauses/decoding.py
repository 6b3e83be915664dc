"""The INC clause: decoding with a cache."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="INC-1",
        level="MAY",
        title="Cached decoding equals one causal pass",
        statement=(
            "Decoding token by token with a key/value cache equals one causal pass over the whole sequence, for each "
            "item of the batch. Where `decodes_ragged` is claimed, items may differ in length."
        ),
        why=(
            "Language models are trained in one causal pass and served with a cache. If the two differ, the model that "
            "is served is not the one that was trained."
        ),
        source=(
            "Shazeer 2019 (incremental multi-head attention); known bugs: meta-pytorch/torchtune#959, "
            "lucidrains/x-transformers#311"
        ),
        differs=(
            "One query against the cache needs a bottom-right causal mask or none. The `is_causal` of "
            "F.scaled_dot_product_attention is top-left, and would let that query see only the first key."
        ),
        violation=(
            "`is_causal=True`, aligned top-left, for one query against the cache: each new token sees only the first "
            "key."
        ),
        fix=(
            "Give a single query no causal mask, or one aligned bottom-right; append new keys after those in the "
            "cache, for each item at its own length."
        ),
    ),
)
