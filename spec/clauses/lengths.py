"""The LEN clause: how many keys, and queries, each item of a dense batch has."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="LEN-1",
        level="MAY",
        title="Keys after an item's length reach nothing",
        statement=(
            "With a number of keys for each item, an item sees its first keys, so many, and what is"
            " after them has no effect, even if it is NaN. Causal mask, window, chunks and ALiBi"
            " count places from the item's own lengths, as for the item alone. With numbers of"
            ' queries too (`Claims.lengths="both"`), contexts after an item\'s queries are zero.'
            " Under the policy `uniform` of MSK-8, the mean of an empty row may be of all values,"
            " or of the item's own; that is the only exception."
        ),
        why=(
            "A cache has room for more than a text has tokens, and what lies there is left from"
            " another request. One key too many is another user's, and NaN there spoils an answer"
            " at random."
        ),
        source=(
            "flash-attention (`cache_seqlens`, `seqused_k`), JAX (`key_value_seq_lengths`), ONNX"
            " Attention-24 (`nonpad_kv_seqlen`); known bug: Dao-AILab/flash-attention#1745"
        ),
        differs=(
            "flash-attention aligns each item bottom-right by its own keys, and all its queries."
            " JAX takes lengths of queries too, and aligns top-left. ONNX counts places from"
            " nonpad_kv_seqlen - L."
        ),
        violation="`softmax(scores.masked_fill(t >= n, -inf)) @ v`, with NaN in v: 0 * NaN is NaN.",
        fix=(
            "Load keys and values after an item's length as zeros, or skip them, and take p = i +"
            " own keys - own queries for bottom-right."
        ),
    ),
)
