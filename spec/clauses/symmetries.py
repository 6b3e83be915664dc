"""The EQV clauses: symmetries of attention, which need no oracle."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="EQV-1",
        level="MUST",
        title="Batch items are independent",
        statement="The result for one item of a batch depends neither on the other items nor on B.",
        source="Follows from Vaswani et al. 2017, equation 1, applied to each item",
        differs=(
            "Exact bits are another matter: matrix products may be split differently for another B "
            "(pytorch/pytorch#136338, #124025), so equality across batch sizes is within the bound."
        ),
    ),
    Clause(
        id="EQV-2",
        level="MUST",
        title="Permuting queries permutes outputs",
        statement="Permuting the queries (and the mask's rows) permutes the outputs in the same way.",
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: each query is a row of its own; Lee et al. 2019 (Set "
            "Transformer)"
        ),
        differs="",
    ),
    Clause(
        id="EQV-3",
        level="MUST",
        title="The order of keys is arbitrary",
        statement="Permuting keys and values (and the mask's columns) together changes nothing.",
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the context is a sum over keys; Lee et al. 2019 (Set "
            "Transformer)"
        ),
        differs="",
    ),
    Clause(
        id="EQV-4",
        level="MUST",
        title="Contexts are linear in the values",
        statement="Contexts are linear in the value path: scaling or adding projected values scales or adds contexts.",
        source="Follows from equation 1 of Vaswani et al. 2017: the weights do not depend on the values",
        differs="",
    ),
    Clause(
        id="EQV-5",
        level="MUST",
        title="A zero query averages the values",
        statement="A query projection of zero gives the mean of the allowed values.",
        source="Follows from equation 1 of Vaswani et al. 2017: equal scores give equal weights",
        differs="",
    ),
    Clause(
        id="EQV-6",
        level="MUST",
        title="One allowed key gives its value",
        statement="A row with exactly one allowed key gives that key's projected value as the context.",
        source="Follows from equation 1 of Vaswani et al. 2017: the softmax of one score is 1",
        differs=(
            "In training mode with dropout, torch.nn.MultiheadAttention returns a weight of 0 or 1/(1-p) for such a "
            "row (pytorch/pytorch#90842)."
        ),
    ),
    Clause(
        id="EQV-7",
        level="MUST",
        title="Duplicating every key changes nothing",
        statement="Duplicating every key and value (with its mask column) changes nothing.",
        source="Follows from equation 1 of Vaswani et al. 2017: each weight is halved and counted twice",
        differs=(
            "This does not hold where an extra key is present: `add_zero_attn` in torch.nn.MultiheadAttention, or an "
            "attention sink, is not duplicated."
        ),
    ),
    Clause(
        id="EQV-8",
        level="MUST",
        title="Self-attention is cross-attention on itself",
        statement="Self-attention on x equals cross-attention on (x, x, x), whether one tensor or three copies.",
        source="Vaswani et al. 2017, section 3.2.3: self-attention takes query, key and value from the same place",
        differs=(
            "torch.nn.MultiheadAttention tests whether query, key and value are the same object, and computes "
            "differently if so (packed projection, fast path): passing a clone can turn NaN into b_o for a wholly "
            "padded item (2.13, no gradient, `need_weights=False`)."
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
        source="Vaswani et al. 2017, section 3.2.2: W_i^Q, W_i^K, W_i^V",
        differs=(
            "Keras' MultiHeadAttention takes its arguments in the order query, value, key; the others here take "
            "query, key, value."
        ),
    ),
)
