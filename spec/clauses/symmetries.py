"""The EQV clauses: symmetries of attention, which need no oracle."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="EQV-1",
        level="MUST",
        title="Batch items are independent",
        statement="The result for one item of a batch depends neither on the other items nor on B.",
        why=(
            "Otherwise an answer depends on which requests shared its batch: it cannot be reproduced alone, and one "
            "user's data reaches another's answer."
        ),
        source="Follows from Vaswani et al. 2017, equation 1, applied to each item",
        differs=(
            "Exact bits are another matter: matrix products may be split differently for another B "
            "(pytorch/pytorch#136338, #124025), so equality across batch sizes is within the bound."
        ),
        violation=(
            "`(scores - scores.max()).exp()`, with the maximum of the whole batch: beside an item with scores of 200, "
            "the exponentials of an ordinary one underflow in float32, and 0 / 0 is NaN."
        ),
    ),
    Clause(
        id="EQV-2",
        level="MUST",
        title="Permuting queries permutes outputs",
        statement="Permuting the queries (and the mask's rows) permutes the outputs in the same way.",
        why=(
            "Kernels take the queries in chunks, packed, or one by one, and models put order into the inputs, as "
            "positions. A result that depends on the rows before it breaks both."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: each query is a row of its own; Lee et al. 2019 (Set "
            "Transformer)"
        ),
        differs="",
        violation=(
            "A running maximum and sum that are not reset between queries: each row's softmax also counts the keys of "
            "the rows before it."
        ),
    ),
    Clause(
        id="EQV-3",
        level="MUST",
        title="The order of keys is arbitrary",
        statement="Permuting keys and values (and the mask's columns) together changes nothing.",
        why=(
            "Caches are paged, evicted and filled in any order, and models of sets or graphs have no order. A result "
            "must not depend on where a key is stored."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the context is a sum over keys; Lee et al. 2019 (Set "
            "Transformer)"
        ),
        differs="",
        violation=(
            "An online softmax over tiles of 64 keys that never rescales its running sums: the result depends on which "
            "tile holds the largest score."
        ),
    ),
    Clause(
        id="EQV-4",
        level="MUST",
        title="Contexts are linear in the values",
        statement="Contexts are linear in the value path: scaling or adding projected values scales or adds contexts.",
        why=(
            "Folding W_v into W_o, scaling values for a low-precision kernel, and reading off what each token "
            "contributes all rest on this."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: the weights do not depend on the values",
        differs="",
        violation=(
            "`weights @ F.normalize(v, dim=-1)`, to keep activations small: doubling the values leaves the contexts as "
            "they were."
        ),
    ),
    Clause(
        id="EQV-5",
        level="MUST",
        title="A zero query averages the values",
        statement=(
            "Under a boolean mask or none, a query projection of zero gives the mean of the allowed values. Over 2^k "
            "keys whose values are small integers the mean is exact, unless the implementation declares that it "
            "retiles, or that it does not divide by the sum (`Rounding.log_normaliser`)."
        ),
        why=(
            "The answer can be worked out by hand, and a count that includes padding shows at once. A layer whose "
            "query projection starts at zero begins its training in this state."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: equal scores give equal weights",
        differs="",
        violation=(
            "`(scores.exp() * mask) @ v / S`: it divides by the number of all keys, so with half of them masked the "
            "context is half the mean."
        ),
    ),
    Clause(
        id="EQV-6",
        level="MUST",
        title="One allowed key gives its value",
        statement=(
            "A row with exactly one allowed key gives that key's projected value as the context. So does a row in "
            "which one key wins by so much that the exponentials of all others vanish, and then exactly, unless the "
            "implementation declares that it retiles, or that it does not divide by the sum."
        ),
        why=(
            "The first position of every causal sequence has one allowed key, itself. What goes wrong there is in "
            "every sequence that a decoder reads or writes."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: the softmax of one score is 1",
        differs=(
            "In training mode with dropout, torch.nn.MultiheadAttention returns a weight of 0 or 1/(1-p) for such a "
            "row (pytorch/pytorch#90842)."
        ),
        violation=(
            "`e / (1 + e.sum(-1, keepdim=True))` with `e = scores.exp()`, a softmax with a sink that nobody asked for: "
            "the only allowed key gets less than the whole weight."
        ),
    ),
    Clause(
        id="EQV-7",
        level="MUST",
        title="Duplicating every key changes nothing",
        statement="Duplicating every key and value (with its mask column) changes nothing.",
        why=(
            "It tells an average from a sum. A context that grows with the number of keys is larger on long inputs "
            "than any seen in training."
        ),
        source="Follows from equation 1 of Vaswani et al. 2017: each weight is halved and counted twice",
        differs=(
            "This does not hold where an extra key is present: `add_zero_attn` in torch.nn.MultiheadAttention, or an "
            "attention sink, is not duplicated."
        ),
        violation="`scores.sigmoid() @ v`: each key counts for itself, so every key given twice doubles the context.",
    ),
    Clause(
        id="EQV-8",
        level="MUST",
        title="Self-attention is cross-attention on itself",
        statement=(
            "Self-attention on x equals cross-attention on (x, x, x), whether one tensor or three copies; and inputs "
            "of which one is a part of another are what they are, wherever they begin in memory."
        ),
        why=(
            "Encoders pass one tensor three times, whereas wrappers, hooks and compilers pass views or copies. If "
            "identity selects the code, a harmless change of the caller changes results."
        ),
        source="Vaswani et al. 2017, section 3.2.3: self-attention takes query, key and value from the same place",
        differs=(
            "torch.nn.MultiheadAttention tests whether query, key and value are the same object, and computes "
            "differently if so (packed projection, fast path): passing a clone can turn NaN into b_o for a wholly "
            "padded item (2.13, no gradient, `need_weights=False`)."
        ),
        violation=(
            "`if query is key: return self.fast(query)`, where `fast` leaves the mask out: with `x.clone()` as the "
            "key, the result is another."
        ),
    ),
    Clause(
        id="EQV-9",
        level="MUST",
        title="Each input has its own projection",
        statement=(
            "Query, key and value each go through their own projection: swapping two of the inputs changes the result "
            "as the oracle says."
        ),
        why=(
            "A projection that is used twice, or for the wrong input, trains without complaint. It shows when weights "
            "from elsewhere are loaded, as output that is wrong without an error."
        ),
        source="Vaswani et al. 2017, section 3.2.2: W_i^Q, W_i^K, W_i^V",
        differs=(
            "Keras' MultiHeadAttention takes its arguments in the order query, value, key; the others here take "
            "query, key, value."
        ),
        violation="`v = self.w_k(value)`, a slip of copying: the values are projected by W_k, and W_v is never used.",
    ),
)
