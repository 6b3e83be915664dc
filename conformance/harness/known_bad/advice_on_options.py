"""Fixes of defects of what a call says, and of norms and rotations; needs no torch."""

ROTATE = "Rotate queries and keys alike, each by its own position: `q, k = rotate(q), rotate(k)`."
NORM = (
    "Norm queries and keys alike, over the declared axes:"
    " `x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()`."
)
# By how the diagnosis begins: of several, the longest counts.

# The clause and the fix, by the beginning of the words of a diagnosis.
OF_OPTIONS: dict[str, tuple[str, str]] = {
    "the window has no effect": (
        "WIN-1",
        "Pass the window on, and use it on every path, the causal one too.",
    ),
    "the window has one key too": (
        "WIN-1",
        "Both bounds are inclusive: `(t >= p - left) & (t <= p + right)`, with p the query's"
        " place.",
    ),
    "the window has its sides exchanged": (
        "WIN-1",
        "`left` is before the query's own key, and `right` after it.",
    ),
    "the window is aligned at the other end": (
        "WIN-1",
        "Count from p = i + S - L for bottom-right, and from p = i for top-left, as the causal mask"
        " does.",
    ),
    "a side of the window without a bound": (
        "WIN-2",
        "Leave out the comparison of a side without a bound.",
    ),
    "the chunks have no effect": (
        "CHK-1",
        "Compare `t // chunk` with `p // chunk`, beside mask, causality and window.",
    ),
    "the chunks are read as a window": (
        "CHK-1",
        "A chunk begins at a multiple of its size: `t // chunk == p // chunk`.",
    ),
    "the chunks have one place too": (
        "CHK-1",
        "Divide places that count from 0 by the size of a chunk, as it is given.",
    ),
    "the chunks are aligned at the other end": (
        "CHK-1",
        "The place of query i is i + S - L for bottom-right, and i for top-left.",
    ),
    "the lengths have no effect": (
        "LEN-1",
        "Set the scores of keys at and after an item's length to -inf.",
    ),
    "the first key after an item's own": (
        "LEN-1",
        "Lengths count keys: `t < length` is what an item has.",
    ),
    "places count from the lengths with padding": (
        "LEN-1",
        "Bottom-right, the place of query i of an item is i + its keys - its queries.",
    ),
    "places count from the numbers of all tokens": (
        "PAK-1",
        "Bottom-right, the place of query i of a sequence is i + its keys - its queries.",
    ),
    "as many keys are read for each sequence": (
        "PAK-1",
        "Read keys up to the next offset, and mask what is after it in the last tile.",
    ),
    "the lengths of the first item": (
        "LEN-1",
        "Each item has lengths of its own: index them by the item, and not by the head.",
    ),
    "the softcap has no effect": (
        "CAP-1",
        "`scores = cap * torch.tanh(scores / cap)`, where there is a cap.",
    ),
    "the softcap acts": ("CAP-1", "Scale, cap, add the bias, mask: in this order."),
    "the sinks have no effect": (
        "SNK-1",
        "Add `exp(sink - maximum)` to the sum of each row, once.",
    ),
    "the sinks are": (
        "SNK-1",
        "A sink is a score: add `exp(sink - maximum)` to the sum, with no scale.",
    ),
    "the sink of the first head": (
        "SNK-1",
        "Each query head has a sink of its own: `sinks.view(-1, 1, 1)`.",
    ),
    "the slopes of ALiBi have no effect": (
        "ALB-1",
        "Add `slope * (t - p)` to the scores of each head.",
    ),
    "the bias of ALiBi has the opposite sign": (
        "ALB-1",
        "Far keys get the lower scores: `slope * (t - p)`.",
    ),
    "the slope of the first head": (
        "ALB-1",
        "Each query head has a slope of its own: `slopes.view(-1, 1, 1)`.",
    ),
    "the slopes of the first item": (
        "ALB-1",
        "Slopes (B, H) are of items and heads: `slopes[:, :, None, None]`.",
    ),
    "the slopes of ALiBi are 2^(-8j/H)": (
        "ALB-2",
        "Take n = 2^floor(log2 H): the first n slopes are 2^(-8j/n), the others odd powers of"
        " 2^(-4/n).",
    ),
    "the slopes of ALiBi begin with 1": ("ALB-2", "The first slope is 2^(-8/n): j begins at 1."),
    "the scores depend on positions": (
        "ROT-1",
        "If that is meant, claim it, `Claims(rotary=Rotary(...))`; else leave it out.",
    ),
    "the queries and keys are normed": (
        "QKN-1",
        "If that is meant, claim it, `Claims(qk_norm=QkNorm(...))`, and a rotation too.",
    ),
    "queries and keys are not rotated": ("ROT-1", ROTATE),
    "the keys are not rotated": ("ROT-1", ROTATE),
    "the queries are not rotated": ("ROT-1", ROTATE),
    "the pairs of columns that are rotated": (
        "ROT-1",
        "Turn column m with column m + r / 2 (`x.chunk(2, -1)`) for halves, or with its neighbour"
        " (`x[..., 0::2], x[..., 1::2]`), as the weights were trained.",
    ),
    "the rotation is in the other direction": (
        "ROT-1",
        "`first * cos - second * sin, second * cos + first * sin`, in this order.",
    ),
    "the frequencies of the rotation": (
        "ROT-1",
        "Make frequencies and angles in float32 in each call: a buffer of them is rounded where the"
        " module is cast.",
    ),
    "the base of the rotation": (
        "ROT-1",
        "Take the base (`rope_theta`) from the model that the weights are of.",
    ),
    "the positions of each call": (
        "ROT-1",
        "Add the length of the cache to the positions of new queries and keys.",
    ),
    "queries and keys are not normed": ("QKN-1", NORM),
    "the keys are not normed": ("QKN-1", NORM),
    "the queries are not normed": ("QKN-1", NORM),
    "the norm of queries and keys": ("QKN-1", NORM),
    "the weight of the norm": ("QKN-1", "Multiply by the weight after the division."),
}
