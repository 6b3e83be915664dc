"""The SMX clauses: how scores become weights."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SMX-1",
        level="MUST",
        title="Weights are probabilities",
        statement=(
            "Every weight is in [0, 1], up to rounding, and every row with at least one allowed key"
            " sums to 1 within the bound."
        ),
        why=(
            "If the sum is not 1, the context is scaled by a factor that depends on how much is"
            " masked, so padded and unpadded batches give activations of different magnitude."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the softmax is a probability"
            " distribution over the keys"
        ),
        differs=(
            "torch.nn.MultiheadAttention returns weights after dropout, so in training mode its"
            " rows do not sum to 1 (DRP-4)."
        ),
        violation=(
            "`scores.softmax(-1) * mask`, without renormalising: a row whose masked keys had 40% of"
            " the weight sums to 0.6."
        ),
        fix=(
            "Mask the scores with -infinity before the softmax instead of the weights after it, and"
            " do not scale, clamp or round the weights."
        ),
    ),
    Clause(
        id="SMX-2",
        level="MUST",
        title="The softmax runs over keys",
        statement=(
            "The softmax runs over the keys: the weights match the oracle's, row by row, within the"
            " bound."
        ),
        why=(
            "A softmax over another dimension makes each result depend on the other queries or"
            " heads. The loss still falls, but decoding one query at a time then differs from"
            " training."
        ),
        source="Vaswani et al. 2017, equation 1",
        differs=(
            "A softmax over the queries or the heads has the expected shape, but sums to 1 along"
            " the wrong dimension."
        ),
        violation=(
            "`scores.softmax(-2)` on scores of shape (B, H, L, S): each column sums to 1, and with"
            " L = 1 every weight is 1."
        ),
        fix=(
            "`scores.softmax(dim=-1)`: the last dimension of scores of shape (B, H, L, S) is that"
            " of the keys."
        ),
        general=True,
    ),
    Clause(
        id="SMX-3",
        level="MUST",
        title="A constant added to a row's scores cancels",
        statement=(
            "Adding one constant to all scores of a row changes nothing. (Tested through the key"
            " bias: b_k adds q.b_k to the score of every key in a row.)"
        ),
        why=(
            "No gradient constrains the common level of a row's scores (GRD-7), so it can drift"
            " during training. Code that depends on it works until the level has drifted far"
            " enough."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the softmax is invariant to a shift of"
            " its argument"
        ),
        differs=(
            "Finite fill values for masked scores break this: -1e9, or the -10000 that ONNX"
            " Runtime's contrib operator adds, competes with scores that are themselves very"
            " negative."
        ),
        violation=(
            "`e / (e.sum(-1, keepdim=True) + 1e-6)` with `e = scores.exp()`: with scores of 0, 1"
            " and 2, lowering all three by 20 lowers the sum of the weights from 1 to 0.02."
        ),
        fix=(
            "Let nothing depend on the level of the scores: no clamp, no epsilon or extra term in"
            " the sum, and -infinity instead of a finite fill."
        ),
    ),
    Clause(
        id="SMX-4",
        level="MUST",
        title="Large scores do not overflow",
        statement=(
            "Finite inputs whose scores reach into the thousands give finite outputs and weights"
            " that sum to 1."
        ),
        why=(
            "Scores grow during training, most of all at a high learning rate. One overflow makes"
            " the output NaN, then the loss and, after the next step, every weight."
        ),
        source=(
            "Milakov & Gimelshein 2018 (safe and online softmax): the row's maximum is subtracted"
            " before the exponential"
        ),
        differs=(
            "torch.softmax and F.scaled_dot_product_attention subtract the maximum. A hand-written"
            " exp(x) / sum(exp(x)) overflows in float32 for scores above about 88.7."
        ),
        violation=(
            "`scores.exp() / scores.exp().sum(-1, keepdim=True)`: in float32, a score of 89 gives"
            " infinity / infinity, which is NaN."
        ),
        fix="Subtract each row's largest score before `exp`, or use `torch.softmax`, which does.",
        general=True,
    ),
    Clause(
        id="SMX-5",
        level="MUST",
        title="Contexts lie within the range of the allowed values",
        statement=(
            "In a row with at least one allowed key, each head's context lies in the convex hull of"
            " the allowed values: every coordinate lies between the smallest and the largest value"
            " of that coordinate, within the bound."
        ),
        why=(
            "This bounds the activations: an average is no larger than its largest term, however"
            " many keys there are. Without it, activations grow with depth, or on inputs longer"
            " than those seen in training."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: non-negative weights that sum to 1"
            " form a convex combination"
        ),
        differs=(
            "Dropout in training mode leaves the hull, since the surviving weights are scaled up."
        ),
        violation=(
            "An online softmax that rescales its running sum when a larger maximum appears, but not"
            " its running context: earlier tiles count too much, and with equal values the context"
            " is larger than the value."
        ),
        fix=(
            "Use weights that are not negative and sum to 1. In an online softmax, rescale the"
            " running context by the same factor as the running sum whenever the maximum grows, and"
            " divide by the sum once, at the end."
        ),
    ),
    Clause(
        id="SMX-6",
        level="MUST",
        title="Scores are scaled by 1/sqrt(d_k)",
        statement=(
            "Scores are scaled by 1/sqrt(d_k), not by 1/sqrt(D), 1/d_k or 1, unless another scale"
            " is claimed (`Claims.scale`): then by that."
        ),
        why=(
            "Scores that are too large saturate the softmax, and its gradient vanishes. With a"
            " scale that is merely different, a pretrained model gives worse outputs, without an"
            " error."
        ),
        source=(
            "Vaswani et al. 2017, equation 1 and section 3.2.1; known bug: scaling by the model"
            " width (FrancescoSaverioZuppichini/ViT#1, FareedKhan-dev/train-llm-from-scratch#3)"
        ),
        differs=(
            "torch, JAX, Keras and ONNX scale by the head width by default; MLX has no default and"
            " requires the argument `scale`. They also apply the scale at different points: Keras"
            " and Flax scale the query before the product, which rounds differently. T5 does not"
            " scale."
        ),
        violation=(
            "`q @ k.transpose(-1, -2) / math.sqrt(d_model)`: with 8 heads, the scores are 2.8 times"
            " too small, and the weights too uniform."
        ),
        fix=(
            "Multiply the scores by `head_dim**-0.5` exactly once, or declare another scale with"
            " `Claims(scale=...)`."
        ),
        general=True,
    ),
)
