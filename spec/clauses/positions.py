"""The ROT and QKN clauses: what stands between the projections and the scores."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="ROT-1",
        level="MAY",
        title="Rotary scores depend on differences of positions only",
        statement=(
            "Each pair m of columns of the projected queries and keys is turned by its position"
            " times base^(-2m/r), as `Rotary` says: r columns of each head, in halves or"
            " interleaved. Positions count from 0, exactly, however long the sequence is; with a"
            " cache they go on where it ends, and gradients are turned back. Scores then depend on"
            " differences of positions only, except where a norm that has weights, or takes away a"
            " mean, comes after the rotation."
        ),
        why=(
            "Nearly all decoders of today rotate. A weight that was trained with one convention"
            " gives other scores with any other, and text that is nearly right."
        ),
        source="Su et al. 2021, section 3.2",
        differs=(
            "Llama's own code, GPT-J and flash-attention's interleaved=True turn neighbouring"
            " columns; GPT-NeoX and transformers turn column m with column m + r / 2, so that"
            " weights are permuted where they are converted. GPT-NeoX and Phi rotate a part of each"
            " head. nanochat turns the other way. For longer inputs, all angles are divided by a"
            " factor (Chen et al. 2023), or the base is stretched by a power of one."
        ),
        violation=(
            "Weights for interleaved pairs are loaded into code for halves; or each decoded token"
            " is at position 0; or positions are counted in bfloat16, where 257 is 256."
        ),
        fix=(
            "Rotate queries and keys, not values, with cosines and sines of exact positions; add"
            " the length of the cache to them."
        ),
    ),
    Clause(
        id="QKN-1",
        level="MAY",
        title="A norm of queries and keys acts as declared",
        statement=(
            "Projected queries and keys are divided by their root mean square, or by their length,"
            " or normed as by a layer norm, as `QkNorm` says: over each head or over all of them,"
            " before or after a rotation, with the declared eps and weight. Rows of zeros give"
            " finite results."
            " Gradients of inputs and weights are within the bound."
        ),
        why=(
            "A norm keeps the scores of large models in a range in which they can be trained. Over"
            " another axis, or without its weight, it is another model."
        ),
        source="Henry et al. 2020, section 3; Zhang and Sennrich 2019, section 3",
        differs=(
            "Qwen3, Gemma 3 and ViT-22B norm each head, OLMo 2 and Chameleon's first layers the"
            " whole width. Gemma multiplies by 1 + weight. Most norm before they rotate; nanochat"
            " norms afterwards, and has no weight. Swin V2 divides by the length, and learns a"
            " scale; x-transformers' qk_rmsnorm divides by it, and multiplies by the root of the"
            " width, without an eps."
        ),
        violation="`norm(q)` before the heads are split, with the weight of one head: no error.",
        fix="Norm the axis that is declared, in float32, with eps inside of the root.",
    ),
)
