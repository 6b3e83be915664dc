"""What is to be done about a diagnosis: the usual fix, and the clause that is about such a defect.

It goes by the words of the diagnosis, which are all that a report keeps, and needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What helps against a defect.

    clause: the id of the clause that such a defect violates most directly. fix: one or two
    sentences, with code.
    """

    clause: str
    fix: str


SCALE = (
    "Multiply the scores by `q.shape[-1] ** -0.5`, once, with d_k the width of one head, on every"
    " path"
)
FILL = '`scores.masked_fill(~mask, float("-inf"))` before the softmax'
BROADCAST = (
    "Broadcast the mask to (B, H, L, S) by its axes: `mask[:, None, None]` for (B, S), `mask[:,"
    " None]` for"
)
BIASES = "Call the projection as a module, or add its bias: `F.linear(x, w, b)`."
OWN_PROJECTION = "Give each input to its own layer: `q, k, v = w_q(query), w_k(key), w_v(value)`."
MATRIX = "`nn.Linear` computes `x @ weight.T`: transpose the matrix exactly once."
SPLIT = (
    "Split by `x.view(B, length, n_heads, d_k).transpose(1, 2)`: each head has d_k neighbouring"
    " columns."
)
MERGE = "Merge by `context.transpose(1, 2).reshape(B, L, n_heads * d_k)`."
OF_ITS_OWN = (
    "Keep the axis of the heads, (B, H, L, S), from the scores to the contexts; take no slice or"
    " mean of it."
)
TRIANGLE = "`torch.ones(L, S, dtype=torch.bool).tril()` is what a query may see"
TILE = (
    "Round the number of tiles up, and mask what lies beyond S in the last one: set such scores to"
    " `-inf`."
)
COLUMNS = "Loop over all columns of a head, and mask what lies beyond d_k in the last block."
STALE = (
    "Compute it anew in each call, or make all that it depends on a part of the key of the cache."
)
PRECISE = (
    "Keep scores, softmax and sums in the dtype of the inputs, or in float32 if that is half"
    " precision"
)
CONNECTED = (
    "Remove what cuts off the history: `detach()`, `.data`, `torch.no_grad()`, or a hand-written"
    " backward pass"
)
GROUPS = (
    "`k.repeat_interleave(n_heads // n_kv_heads, dim=1)`, and v alike: query head h has key/value"
    " head"
)
LAYOUT = (
    "Where heads and items share an axis, repeat the mask as the heads lie in it:"
    " `mask.repeat_interleave(H, 0)`"
)
ROTATE = "Rotate queries and keys alike, each by its own position: `q, k = rotate(q), rotate(k)`."
NORM = (
    "Norm queries and keys alike, over the declared axes:"
    " `x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()`."
)
# By how the diagnosis begins: of several, the longest counts.
ADVICE: dict[str, Advice] = {
    "the scores are": Advice("SMX-6", f"{SCALE}."),
    "the scores are scaled as usual": Advice(
        "SCL-1",
        "Multiply the scores by the scale that the call gives: ask `if scale is None`, not `scale"
        " or ...`.",
    ),
    "the window has no effect": Advice(
        "WIN-1", "Pass the window on, and use it on every path, the causal one too."
    ),
    "the window has one key too": Advice(
        "WIN-1",
        "Both bounds are inclusive: `(t >= p - left) & (t <= p + right)`, with p the query's"
        " place.",
    ),
    "the window has its sides exchanged": Advice(
        "WIN-1", "`left` is before the query's own key, and `right` after it."
    ),
    "the window is aligned at the other end": Advice(
        "WIN-1",
        "Count from p = i + S - L for bottom-right, and from p = i for top-left, as the causal mask"
        " does.",
    ),
    "a side of the window without a bound": Advice(
        "WIN-2", "Leave out the comparison of a side without a bound."
    ),
    "the chunks have no effect": Advice(
        "CHK-1", "Compare `t // chunk` with `p // chunk`, beside mask, causality and window."
    ),
    "the chunks are read as a window": Advice(
        "CHK-1", "A chunk begins at a multiple of its size: `t // chunk == p // chunk`."
    ),
    "the chunks have one place too": Advice(
        "CHK-1", "Divide places that count from 0 by the size of a chunk, as it is given."
    ),
    "the chunks are aligned at the other end": Advice(
        "CHK-1", "The place of query i is i + S - L for bottom-right, and i for top-left."
    ),
    "the lengths have no effect": Advice(
        "LEN-1", "Set the scores of keys at and after an item's length to -inf."
    ),
    "the first key after an item's own": Advice(
        "LEN-1", "Lengths count keys: `t < length` is what an item has."
    ),
    "places count from the lengths with padding": Advice(
        "LEN-1", "Bottom-right, the place of query i of an item is i + its keys - its queries."
    ),
    "places count from the numbers of all tokens": Advice(
        "PAK-1", "Bottom-right, the place of query i of a sequence is i + its keys - its queries."
    ),
    "as many keys are read for each sequence": Advice(
        "PAK-1", "Read keys up to the next offset, and mask what is after it in the last tile."
    ),
    "the lengths of the first item": Advice(
        "LEN-1", "Each item has lengths of its own: index them by the item, and not by the head."
    ),
    "the softcap has no effect": Advice(
        "CAP-1", "`scores = cap * torch.tanh(scores / cap)`, where there is a cap."
    ),
    "the softcap acts": Advice("CAP-1", "Scale, cap, add the bias, mask: in this order."),
    "the sinks have no effect": Advice(
        "SNK-1", "Add `exp(sink - maximum)` to the sum of each row, once."
    ),
    "the sinks are": Advice(
        "SNK-1", "A sink is a score: add `exp(sink - maximum)` to the sum, with no scale."
    ),
    "the sink of the first head": Advice(
        "SNK-1", "Each query head has a sink of its own: `sinks.view(-1, 1, 1)`."
    ),
    "the slopes of ALiBi have no effect": Advice(
        "ALB-1", "Add `slope * (t - p)` to the scores of each head."
    ),
    "the bias of ALiBi has the opposite sign": Advice(
        "ALB-1", "Far keys get the lower scores: `slope * (t - p)`."
    ),
    "the slope of the first head": Advice(
        "ALB-1", "Each query head has a slope of its own: `slopes.view(-1, 1, 1)`."
    ),
    "the slopes of the first item": Advice(
        "ALB-1", "Slopes (B, H) are of items and heads: `slopes[:, :, None, None]`."
    ),
    "the slopes of ALiBi are 2^(-8j/H)": Advice(
        "ALB-2",
        "Take n = 2^floor(log2 H): the first n slopes are 2^(-8j/n), the others odd powers of"
        " 2^(-4/n).",
    ),
    "the slopes of ALiBi begin with 1": Advice(
        "ALB-2", "The first slope is 2^(-8/n): j begins at 1."
    ),
    "the scores depend on positions": Advice(
        "ROT-1", "If that is meant, claim it, `Claims(rotary=Rotary(...))`; else leave it out."
    ),
    "the queries and keys are normed": Advice(
        "QKN-1", "If that is meant, claim it, `Claims(qk_norm=QkNorm(...))`, and a rotation too."
    ),
    "queries and keys are not rotated": Advice("ROT-1", ROTATE),
    "the keys are not rotated": Advice("ROT-1", ROTATE),
    "the queries are not rotated": Advice("ROT-1", ROTATE),
    "the pairs of columns that are rotated": Advice(
        "ROT-1",
        "Turn column m with column m + r / 2 (`x.chunk(2, -1)`) for halves, or with its neighbour"
        " (`x[..., 0::2], x[..., 1::2]`), as the weights were trained.",
    ),
    "the rotation is in the other direction": Advice(
        "ROT-1", "`first * cos - second * sin, second * cos + first * sin`, in this order."
    ),
    "the base of the rotation": Advice(
        "ROT-1", "Take the base (`rope_theta`) from the model that the weights are of."
    ),
    "the positions of each call": Advice(
        "ROT-1", "Add the length of the cache to the positions of new queries and keys."
    ),
    "queries and keys are not normed": Advice("QKN-1", NORM),
    "the keys are not normed": Advice("QKN-1", NORM),
    "the queries are not normed": Advice("QKN-1", NORM),
    "the norm of queries and keys": Advice("QKN-1", NORM),
    "the weight of the norm": Advice("QKN-1", "Multiply by the weight after the division."),
    "the scores are of the opposite sign": Advice(
        "SMX-6", "Remove the minus before the scores or the scale."
    ),
    "the scores are rounded": Advice("NUM-1", f"{PRECISE}."),
    "the scores are scaled by 1/sqrt(d_k) rounded": Advice(
        "NUM-2", "Compute the scale as a Python number, `d_k ** -0.5`, not as a tensor of float32."
    ),
    "the output is": Advice(
        "NUM-1", "Look for a factor after the attention, or a dropout that is on in evaluation."
    ),
    "the weights are": Advice(
        "SMX-1", "Do not change the weights after the softmax, and add nothing to its sum."
    ),
    "the weights are rounded": Advice("NUM-1", f"{PRECISE}."),
    "the bias of the": Advice("CFG-5", BIASES),
    "the biases are missing": Advice("CFG-5", BIASES),
    "the query is not projected": Advice("EQV-9", OWN_PROJECTION),
    "the key is not projected": Advice("EQV-9", OWN_PROJECTION),
    "the value is not projected": Advice("EQV-9", OWN_PROJECTION),
    "the output projection is missing": Advice("HED-5", "Return `w_o(context)`, not the context."),
    "the matrix of the": Advice("EQV-9", MATRIX),
    "the matrix of the output projection": Advice("HED-5", MATRIX),
    "the value is projected by W_k": Advice("EQV-9", OWN_PROJECTION),
    "the values are projected by W_k": Advice("EQV-9", OWN_PROJECTION),
    "the key is projected by W_v": Advice("EQV-9", OWN_PROJECTION),
    "the query is projected by W_k": Advice("EQV-9", OWN_PROJECTION),
    "the key, projected,": Advice("EQV-9", OWN_PROJECTION),
    "the key is passed": Advice("EQV-9", OWN_PROJECTION),
    "the value is passed": Advice("EQV-9", OWN_PROJECTION),
    "key and value are exchanged": Advice("EQV-9", OWN_PROJECTION),
    "the query is passed": Advice("EQV-9", OWN_PROJECTION),
    "the queries are split": Advice("HED-2", SPLIT),
    "the keys are split": Advice("HED-2", SPLIT),
    "the values are split": Advice("HED-2", SPLIT),
    "the queries and keys are split": Advice("HED-2", SPLIT),
    "the heads are split": Advice("HED-2", SPLIT),
    "the heads have their columns": Advice("HED-2", SPLIT),
    "the heads are merged": Advice("HED-2", MERGE),
    "the heads are split and merged": Advice("HED-2", f"{SPLIT} {MERGE}"),
    "the heads are concatenated in reverse": Advice("HED-3", MERGE),
    "each head's context": Advice("HED-2", OF_ITS_OWN),
    "the last head is left out": Advice("HED-2", OF_ITS_OWN),
    "the first head's": Advice("HED-2", OF_ITS_OWN),
    "the key/value heads are tiled": Advice("GQA-1", f"{GROUPS} `h // (n_heads // n_kv_heads)`."),
    "the first key/value head": Advice("GQA-1", f"{GROUPS} `h // (n_heads // n_kv_heads)`."),
    "the mask is ignored": Advice(
        "MSK-1", f"Apply the mask on every path: {FILL}, where True = may attend."
    ),
    "the mask is read the other way round": Advice(
        "MSK-1",
        "Invert it where it enters, `mask = ~mask`: SDPA takes True = may attend,"
        " nn.MultiheadAttention the opposite.",
    ),
    "the masks are read the other way round": Advice(
        "MSK-1", "Invert what is given to SDPA, `attn_mask=~mask`: there True = may attend."
    ),
    "the mask is read as a length": Advice(
        "MSK-1",
        f"Use the entries themselves: {FILL}. A length stands only for masks of the last keys, so"
        " check that.",
    ),
    "the mask of the first": Advice("MSK-6", f"{BROADCAST} (B, L, S); take no slice of an axis."),
    "the mask of the first call": Advice("STA-3", STALE),
    "the mask of the call before": Advice("STA-3", STALE),
    "the mask is applied to the queries": Advice(
        "MSK-1", f"{BROADCAST} (B, L, S): the last axis is that of the keys."
    ),
    "the mask is applied to the first": Advice(
        "MSK-7", "Apply the mask in every tile, at the tile's own offset."
    ),
    "the mask has items and heads exchanged": Advice(
        "MSK-6", f"{BROADCAST} (B, L, S), whatever the sizes are."
    ),
    "the mask is laid out": Advice(
        "MSK-6", f"{LAYOUT} for (B * H), `mask.repeat(H, 1, 1)` for (H * B)."
    ),
    "a mask for all heads is indexed by the head": Advice(
        "MSK-6",
        "Expand it first, `mask.expand(B, H, L, S)`, or use a stride of 0 along axes of size 1.",
    ),
    "the last key cannot be masked": Advice(
        "MSK-7", f"Mask every key alike: {FILL}, without an exception for a position."
    ),
    "the first key cannot be masked": Advice(
        "MSK-7", f"Mask every key alike: {FILL}, without an exception for a position."
    ),
    "mask and causal flag are joined by `or`": Advice(
        "CAU-4", "Join what they allow by `&`: `mask & causal`."
    ),
    "the boolean mask is added": Advice(
        "MSK-11",
        f"Branch on `mask.dtype`: {FILL} if it is boolean, `scores + mask` if it is a float mask.",
    ),
    "the float mask is read as a boolean": Advice(
        "MSK-11", "Add a float mask to the scores: `scores + mask`."
    ),
    "only the infinite entries": Advice(
        "MSK-11", "Add a float mask to the scores, all of it: `scores + mask`."
    ),
    "the float mask is added before": Advice(
        "MSK-11", "Scale first, and add then: `q @ k.mT * scale + mask`."
    ),
    "the float mask is subtracted": Advice(
        "MSK-11", "Add it: `scores + mask`, with -inf for what is masked."
    ),
    "the causal flag is ignored": Advice(
        "CAU-2",
        f"Apply it on every path, beside a mask too: {TRIANGLE} (`tril(S - L)` for bottom-right).",
    ),
    "the causal mask is off by one": Advice(
        "CAU-2",
        "Include the diagonal and no more: `tril()` is what a query may see, or `triu(1)` what is"
        " masked.",
    ),
    "the causal mask is aligned": Advice(
        "CAU-3",
        "`tril()` is `top_left`, `tril(S - L)` is `bottom_right`: use the declared one, or declare"
        " the other with `Claims(causal=...)`.",
    ),
    "the causal mask is inverted": Advice(
        "CAU-1", f"{TRIANGLE}; SDPA takes that, and not `triu(1)`."
    ),
    "the causal mask is turned round": Advice("CAU-1", f"{TRIANGLE}, not `triu()`."),
    "later keys are masked without": Advice(
        "NUM-1",
        "Mask later keys only if the flag is given; if the class is always causal, declare "
        "`Claims(always_causal=True)`.",
    ),
    "a query without an allowed key": Advice(
        "MSK-8",
        "Zero masked weights after the softmax: `scores.masked_fill(~mask,"
        ' float("-inf")).softmax(-1).masked_fill(~mask, 0.0)`; or declare what it does with'
        " `Claims(empty_row=...)`.",
    ),
    "the softmax runs over": Advice(
        "SMX-2", "`scores.softmax(dim=-1)`, with scores of shape (B, H, L, S)."
    ),
    "the softmax is computed in": Advice("NUM-1", f"{PRECISE}."),
    "the softmax does not subtract": Advice(
        "SMX-4", "Use `scores.softmax(-1)`, or subtract `scores.amax(-1, True)`."
    ),
    "masked weights are zeroed": Advice(
        "MSK-3", f"Mask the scores, {FILL}, and not the weights after it."
    ),
    "masked scores are": Advice(
        "MSK-2", f'Use `float("-inf")` for masked scores: {FILL}; a finite number shows.'
    ),
    "masked scores get a finite": Advice(
        "MSK-2", f'Use `float("-inf")` for masked scores, not a number such as -1e4: {FILL}.'
    ),
    "1 is added to the denominator": Advice(
        "SMX-1",
        "Normalise by the sum over the keys alone, `scores.softmax(-1)`; mask a key that is"
        " appended.",
    ),
    "zeros that fill the last tile": Advice("SMX-1", TILE),
    "queries and keys do not count": Advice(
        "SMX-6", "Look for a score that is zero or constant: `q @ k.mT * scale`."
    ),
    "the last key is left out": Advice("MSK-7", "Check the ends of slices: all S keys count."),
    "the first key is left out": Advice("MSK-7", "Check the starts of slices: all S keys count."),
    "the keys after the last whole tile": Advice("NUM-5", TILE),
    "the key after the last whole tile": Advice("NUM-5", TILE),
    "only the first": Advice("NUM-5", "Loop over all S keys, and size the mask by `k.shape[-2]`."),
    "only the first L keys": Advice(
        "NUM-1", "Size everything on the keys' side by `k.shape[-2]`, not by the query."
    ),
    "only the first columns": Advice("SMX-6", COLUMNS),
    "the columns of a head": Advice("SMX-6", COLUMNS),
    "the last column of a head": Advice("SMX-6", COLUMNS),
    "the value of the last key": Advice(
        "MSK-7", "Check the ends of slices and tiles of the values."
    ),
    "the weights of the first call": Advice("STA-3", STALE),
    "the weights of the call before": Advice("STA-3", STALE),
    "the scores of the first call": Advice("STA-3", STALE),
    "the scores of the call before": Advice("STA-3", STALE),
    "the output of the first call": Advice("STA-3", STALE),
    "the output of the call before": Advice("STA-3", STALE),
    "something of an earlier call": Advice("STA-3", STALE),
    "products with keys and values are in TF32": Advice(
        "NUM-1",
        'Pass `input_precision="ieee"` to `tl.dot`, do not allow TF32 for float32 inputs, or'
        ' declare it: `Rounding(products="tf32")`.',
    ),
    "the context is zero": Advice(
        "NUM-1", "Check that the values reach the product: `weights @ v`."
    ),
    "the output is zero": Advice(
        "NUM-1", "Return what was computed, and check that kernels write their result."
    ),
    "the query is added": Advice(
        "NUM-1", "Return the attention alone; the caller adds the residual."
    ),
    "no gradient reaches": Advice("GRD-1", f"{CONNECTED} that leaves it out."),
    "all gradients are": Advice(
        "GRD-1", "Look for a factor in the backward pass, or for a loss scale."
    ),
    "the gradient of": Advice(
        "GRD-1", "Look for a factor in this part of the backward pass, or a sum done twice."
    ),
}
# "only the first 64 columns of a head" is about columns, whatever their number is.
NUMBERED = re.compile(r"(?<=only the first )\d+ (?=columns)")


def subject_of(diagnosis: str) -> str:
    """Return the id of the clause that the defect of a diagnosis most directly violates, "" if none
    is known.

    >>> subject_of("the mask is ignored, with a causal flag"), subject_of("")
    ('MSK-1', '')
    """
    found = _advice_on(diagnosis)
    return found.clause if found else ""


def fix_of(diagnosis: str) -> str:
    """Return the usual fix of what a diagnosis names, of each defect if it names two, "" if none is
    known.

    >>> fix_of("the float mask is added before the scores are scaled")
    'Scale first, and add then: `q @ k.mT * scale + mask`.'
    """
    first = _advice_on(diagnosis)
    if first is None:
        return ""
    _, *others = diagnosis.split(", and ")
    fixes = [first.fix, *(found.fix for found in map(_advice_on, others) if found)]
    return " ".join(dict.fromkeys(fixes))


def _advice_on(diagnosis: str) -> Advice | None:
    """Return the advice whose beginning is the longest that a diagnosis begins with."""
    text = NUMBERED.sub("", diagnosis)
    begins = [beginning for beginning in ADVICE if text.startswith(beginning)]
    return ADVICE[max(begins, key=len)] if begins else None
