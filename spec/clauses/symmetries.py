"""The EQV clauses: symmetries of attention, most of which need no oracle."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="EQV-1",
        level="MUST",
        title="Batch items are independent",
        statement="The result for one item of a batch depends neither on the other items nor on B.",
        why=(
            "Otherwise a result depends on which requests shared its batch: it cannot be reproduced"
            " in isolation, and one user's data reaches another's result."
        ),
        source="Follows from Vaswani et al. 2017, equation 1, applied to each item",
        differs=(
            "Identical bits are another matter: matrix products may be split differently for"
            " another B (pytorch/pytorch#136338, #124025), so equality across batch sizes is within"
            " the bound."
        ),
        violation=(
            "`(scores - scores.max()).exp()`, with the maximum of the whole batch: next to an item"
            " with scores of 200, the exponentials of an ordinary item underflow in float32, and 0"
            " / 0 is NaN."
        ),
        fix=(
            "Take maxima, sums and means along the last dimension, never over the batch, and keep"
            " nothing of one item for the next."
        ),
    ),
    Clause(
        id="EQV-2",
        level="MUST",
        title="Permuting queries permutes outputs",
        statement=(
            "Permuting the queries (and the mask's rows) permutes the outputs in the same way."
        ),
        why=(
            "Kernels process queries in chunks, packed, or one by one, and models encode order in"
            " the inputs, as positions. A result that depends on the rows before it breaks both."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: each query is a row of its own; Lee et"
            " al. 2019 (Set Transformer)"
        ),
        differs="",
        violation=(
            "A running maximum and sum that are not reset between queries: each row's softmax also"
            " counts the keys of the rows before it."
        ),
        fix=(
            "Compute each row of scores by itself: reset running maxima and sums for each query,"
            " and index masks by the query's own position."
        ),
    ),
    Clause(
        id="EQV-3",
        level="MUST",
        title="The order of keys does not matter",
        statement="Permuting keys and values (and the mask's columns) together changes nothing.",
        why=(
            "Caches are paged, evicted and filled in any order, and models of sets or graphs have"
            " no order. A result must not depend on where a key is stored."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the context is a sum over keys; Lee et"
            " al. 2019 (Set Transformer)"
        ),
        differs="",
        violation=(
            "An online softmax over tiles of 64 keys that never rescales its running sums: the"
            " result depends on which tile holds the largest score."
        ),
        fix=(
            "Rescale running sums at every tile, handle the last tile like the others, and remove"
            " what depends on the position of a key."
        ),
    ),
    Clause(
        id="EQV-4",
        level="MUST",
        title="Contexts are linear in the values",
        statement=(
            "Contexts are linear in the value path: scaling or adding projected values scales or"
            " adds contexts."
        ),
        why=(
            "Folding W_v into W_o, scaling values for a low-precision kernel, and attributing an"
            " output to its tokens all rely on this."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the weights do not depend on the"
            " values"
        ),
        differs="",
        violation=(
            "`weights @ F.normalize(v, dim=-1)`, to keep activations small: doubling the values"
            " leaves the contexts unchanged."
        ),
        fix=(
            "Leave the values alone between W_v and the weighted sum: no normalisation, clamp or"
            " activation."
        ),
    ),
    Clause(
        id="EQV-5",
        level="MUST",
        title="A zero query averages the values",
        statement=(
            "With a boolean mask or none, a query projection of zero gives the mean of the allowed"
            " values. Over 2^k keys whose values are small integers the mean is exact, unless the"
            " implementation declares that it retiles (`Claims.retiles`), or that it does not"
            " divide by the sum (`Rounding.log_normaliser`)."
        ),
        why=(
            "The result can be worked out by hand, and a count that includes padding shows at once."
            " A layer whose query projection is initialised to zero starts training in this state."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: equal scores give equal weights",
        differs="",
        violation=(
            "`(scores.exp() * mask) @ v / S`: it divides by the number of all keys, so with half of"
            " them masked the context is half the mean."
        ),
        fix=(
            "Divide by the sum of the exponentials over the allowed keys, not by S. If only the"
            " last bits differ, declare `Claims(retiles=True)`, or no"
            " `Rounding(log_normaliser=False)`."
        ),
    ),
    Clause(
        id="EQV-6",
        level="MUST",
        title="One allowed key gives its value",
        statement=(
            "A row with exactly one allowed key gives that key's projected value as the context. So"
            " does a row in which one key wins by so much that the exponentials of all others"
            " vanish; that result is exact, unless the implementation declares that it retiles, or"
            " that it does not divide by the sum."
        ),
        why=(
            "The first position of every causal sequence has one allowed key, itself. A bug there"
            " affects every sequence that a decoder reads or writes."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: the softmax of one score is 1",
        differs=(
            "In training mode with dropout, torch.nn.MultiheadAttention returns a weight of 0 or"
            " 1/(1-p) for such a row (pytorch/pytorch#90842)."
        ),
        violation=(
            "`e / (1 + e.sum(-1, keepdim=True))` with `e = scores.exp()`, a softmax with a sink"
            " that nobody asked for: the only allowed key gets less than the whole weight."
        ),
        fix=(
            "Divide by the sum of the exponentials and nothing else: no epsilon, sink or extra"
            " term. If only the last bits differ, declare `Claims(retiles=True)`, or no"
            " `Rounding(log_normaliser=False)`."
        ),
    ),
    Clause(
        id="EQV-7",
        level="MUST",
        title="Duplicating every key changes nothing",
        statement="Duplicating every key and value (with its mask column) changes nothing.",
        why=(
            "This distinguishes an average from a sum. A context that grows with the number of keys"
            " is larger on long inputs than any seen in training."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: each weight is halved and counted"
            " twice"
        ),
        differs=(
            "This does not hold with an extra key that is not duplicated: `add_zero_attn` in "
            "torch.nn.MultiheadAttention, or an attention sink."
        ),
        violation=(
            "`scores.sigmoid() @ v`: each key counts on its own, so duplicating every key doubles"
            " the context."
        ),
        fix=(
            "Divide by the sum of the exponentials over all keys, so that the weights of a row sum"
            " to 1."
        ),
    ),
    Clause(
        id="EQV-8",
        level="MUST",
        title="Self-attention equals cross-attention on copies",
        statement=(
            "Self-attention on x equals cross-attention on (x, x, x), whether these are one tensor"
            " or three copies. Where one input is a slice of another, the result is that of their"
            " values, wherever the slice starts in memory."
        ),
        why=(
            "Encoders pass one tensor three times, whereas wrappers, hooks and compilers pass views"
            " or copies. If object identity selects the code, a harmless change in the caller"
            " changes results."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.3: self-attention takes query, key and value from the"
            " same place"
        ),
        differs=(
            "torch.nn.MultiheadAttention tests whether query, key and value are the same object"
            " and, if so, computes differently (packed projection, fast path): passing a clone can"
            " turn NaN into b_o for a fully padded item (2.13, no gradient, `need_weights=False`)."
        ),
        violation=(
            "`if query is key: return self.fast(query)`, where `fast` ignores the mask: with"
            " `x.clone()` as the key, the result is different."
        ),
        fix=(
            "Do not select code by `query is key` or by the address of the data, or make sure that"
            " both ways handle all masks."
        ),
    ),
    Clause(
        id="EQV-9",
        level="MUST",
        title="Each input has its own projection",
        statement=(
            "Query, key and value each go through their own projection: swapping two of the inputs"
            " changes the result as the oracle predicts."
        ),
        why=(
            "A projection that is used twice, or for the wrong input, trains without complaint. It"
            " shows only when weights from elsewhere are loaded: the output is incorrect, without"
            " an error."
        ),
        source="Vaswani et al. 2017, section 3.2.2: W_i^Q, W_i^K, W_i^V",
        differs=(
            "Keras' MultiHeadAttention takes its arguments in the order query, value, key; the"
            " others here take query, key, value."
        ),
        violation=(
            "`v = self.w_k(value)`, a copy-and-paste error: the values are projected by W_k, and"
            " W_v is never used."
        ),
        fix=(
            "Project the query with W_q, the key with W_k and the value with W_v; look for a name"
            " that was copied, and for arguments in another order."
        ),
        general=True,
    ),
)
