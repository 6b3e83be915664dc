"""The SMX clauses: how scores become weights."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SMX-1",
        level="MUST",
        title="Weights are probabilities",
        statement="Every weight is in [0, 1], and every row with at least one allowed key sums to 1 within the bound.",
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the softmax is a probability distribution over the keys"
        ),
        differs=(
            "torch.nn.MultiheadAttention returns weights after dropout, so in training mode its rows do not sum to 1 "
            "(DRP-4)."
        ),
    ),
    Clause(
        id="SMX-2",
        level="MUST",
        title="The softmax runs over keys",
        statement="The softmax runs over the keys: the weights match the oracle's, row by row, within the bound.",
        source="Vaswani et al. 2017, equation 1",
        differs=(
            "A softmax over the queries or over the heads has the right shape, and sums to 1 along the wrong dimension."
        ),
    ),
    Clause(
        id="SMX-3",
        level="MUST",
        title="A shift of a row's scores cancels",
        statement=(
            "Adding one constant to all scores of a row changes nothing. (Tested through the key bias: b_k adds q.b_k "
            "to every key of a row.)"
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: the softmax is invariant to a shift of its argument",
        differs=(
            "Finite fills of masked scores break this: -1e9, or the -10000 that ONNX Runtime's contrib operator adds, "
            "competes with scores that are themselves very negative."
        ),
    ),
    Clause(
        id="SMX-4",
        level="MUST",
        title="Large scores do not overflow",
        statement="Finite inputs whose scores reach thousands give finite outputs and weights that sum to 1.",
        source=(
            "Milakov & Gimelshein 2018 (safe and online softmax): the row's maximum is subtracted before the "
            "exponential"
        ),
        differs=(
            "torch.softmax and F.scaled_dot_product_attention subtract the maximum. Hand-written exp(x) / sum(exp(x)) "
            "overflows in float32 for scores above about 88.7."
        ),
    ),
    Clause(
        id="SMX-5",
        level="MUST",
        title="Contexts lie among the allowed values",
        statement=(
            "In a row with at least one allowed key, each head's context lies in the convex hull of the allowed "
            "values: coordinate by coordinate between their least and their greatest, within the bound."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: non-negative weights that sum to 1 form a convex "
            "combination"
        ),
        differs="Dropout in training mode leaves the hull, since the surviving weights are scaled up.",
    ),
    Clause(
        id="SMX-6",
        level="MUST",
        title="Scores are scaled by 1/sqrt(d_k)",
        statement="Scores are scaled by 1/sqrt(d_k), and not by 1/sqrt(D), 1/d_k or 1.",
        source=(
            "Vaswani et al. 2017, equation 1 and section 3.2.1; defect class: scaling by the model width "
            "(FrancescoSaverioZuppichini/ViT#1, FareedKhan-dev/train-llm-from-scratch#3)"
        ),
        differs=(
            "torch, JAX, Keras and ONNX scale by the width of a head by default; MLX has no default and takes `scale` "
            "as a required argument. Where the scale is applied differs too: Keras and Flax scale the query before "
            "the product, which rounds at another place."
        ),
    ),
)
