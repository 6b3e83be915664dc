"""The INC clauses: decoding with a cache."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="INC-1",
        level="MAY",
        title="Cached decoding equals one causal pass",
        statement=(
            "Decoding token by token with a key/value cache equals one causal pass over the whole"
            " sequence, for each item of the batch. Where `decodes_ragged` is claimed, items may"
            " differ in length."
        ),
        why=(
            "Language models are trained in one causal pass and served with a cache. If the two"
            " differ, the model that is served is not the one that was trained."
        ),
        source=(
            "Shazeer 2019 (incremental multi-head attention); known bugs:"
            " meta-pytorch/torchtune#959, lucidrains/x-transformers#311"
        ),
        differs=(
            "One query against the cache needs a bottom-right causal mask or none. The `is_causal`"
            " of F.scaled_dot_product_attention is top-left, and would let that query see only the"
            " first key."
        ),
        violation=(
            "`is_causal=True`, aligned top-left, for one query against the cache: each new token"
            " sees only the first key."
        ),
        fix=(
            "Give a single query no causal mask, or one aligned bottom-right; append new keys after"
            " those in the cache, for each item at its own length."
        ),
    ),
    Clause(
        id="INC-2",
        level="MAY",
        title="Chunks against a cache equal one causal pass",
        statement=(
            "Decoding several new positions at once, against a cache that is empty or has some"
            " already, equals decoding them one by one and one causal pass, however a sequence is"
            " cut into chunks. What takes one position at a time SHOULD refuse several."
        ),
        why=(
            "A prompt fills the cache in one call, or in chunks between the tokens of others, and"
            " speculative decoding checks several tokens at once. Without a causal mask each of"
            " them sees those after it."
        ),
        source=(
            "known bugs: huggingface/candle#3743, pytorch/executorch#21749,"
            " tenstorrent/tt-metal#48899, TinyLLM#17"
        ),
        differs=(
            "Some build a causal mask only where no cache is given, and some take `is_causal=True`,"
            " which is aligned top-left, for queries that come after those in the cache."
        ),
        violation=(
            "No mask where a cache is given, as for a single token: a prompt sees its own future."
        ),
        fix=(
            "Mask the new positions among themselves, aligned bottom-right: query i of n sees the"
            " keys of the cache and the first i + 1 new ones."
        ),
    ),
    Clause(
        id="INC-3",
        level="MAY",
        title="An edited cache decodes what it then holds",
        statement=(
            "After a cache is reordered, cropped or copied, decoding goes on as for the sequences"
            " that it then holds. What is decoded with a copy does not change the original."
        ),
        why=(
            "Beam search reorders the items of a cache, speculative decoding crops it after"
            " rejected tokens, and a shared prompt is copied. A part that is left behind answers"
            " with the tokens of another sequence."
        ),
        source="documentation of the caches of transformers (`reorder_cache`, `crop`)",
        differs=(
            "transformers' caches crop and reorder themselves in place; a sliding window that is"
            " full cannot be cropped."
        ),
        violation=(
            "`reorder_cache` that moves the keys and not the values: each beam has the keys of its"
            " own sequence, and the values of another one."
        ),
        fix=(
            "Apply the edit to all that a cache has: keys, values, lengths, positions, scales."
            " Append with `torch.cat`, or crop with `clone()`, so that no two caches write to one"
            " memory."
        ),
    ),
)
