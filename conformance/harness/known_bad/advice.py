"""What is to be done about a diagnosis: the usual fix, and the clause that is about such a defect.

It goes by the words of the diagnosis, which are all that a report keeps, and needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mha.conformance.harness.known_bad.advice_on_options import OF_OPTIONS


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
ADVICE: dict[str, Advice] = {
    "the scores are": Advice("SMX-6", f"{SCALE}."),
    "the scores are scaled as usual": Advice(
        "SCL-1",
        "Multiply the scores by the scale that the call gives: ask `if scale is None`, not `scale"
        " or ...`.",
    ),
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
ADVICE |= {beginning: Advice(*clause_and_fix) for beginning, clause_and_fix in OF_OPTIONS.items()}
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
