"""The last MSK clauses: NaN where attention is allowed, and float masks of another precision."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MSK-13",
        level="MUST",
        title="NaN at allowed positions shows",
        statement=(
            "NaN in a key that a query may attend to beside others, and NaN or infinity in such a"
            " value, make its output NaN or infinite. NaN in its only key should."
        ),
        why=(
            "NaN is how a training run says that it has diverged, or that a kernel has read what"
            " was never written. Code that turns it into a plausible number hides the step at which"
            " that happened."
        ),
        source="IEEE 754, 6.2: operations on NaN give NaN; softmax(QK^T)V",
        differs=(
            "F.scaled_dot_product_attention, torch.nn.MultiheadAttention and the usual textbook"
            " code let it show; of a row whose keys are all NaN, the fused kernel for the CPU makes"
            " zeros (torch 2.13)."
        ),
        violation=(
            "`weights.nan_to_num()`, meant for rows without an allowed key: a NaN in any key"
            " becomes a weight of zero for all keys, and its row an output of zeros."
        ),
        fix=(
            "Mend only rows without an allowed key, `weights.masked_fill(~mask.any(-1,"
            " keepdim=True), 0.0)`, instead of every NaN."
        ),
    ),
    Clause(
        id="MSK-14",
        level="MUST",
        title="Float masks of another precision are added or refused",
        statement=(
            "A floating-point mask in another precision than the query's is added to the scores, as"
            " the same mask in the query's dtype is, or raises."
        ),
        why=(
            "Masks are often made once, in float32, and used in models of any dtype. If the numbers"
            " of such a mask are read in another way, the wrong keys are hidden without an error."
        ),
        source="PyTorch documentation, type promotion; known bug in torch 2.13's CPU kernel",
        differs=(
            "In float64, the CPU kernel of F.scaled_dot_product_attention and"
            " torch.nn.MultiheadAttention (torch 2.13) accepts a float32 mask, and gives incorrect"
            " numbers when there are more keys than one SIMD vector of the processor holds."
        ),
        violation=(
            "`mask.bool()` for a mask whose dtype is not the query's: a bias of 0.5 in float32"
            " allows its key, and 0 hides it."
        ),
        fix=(
            "Cast the mask to the dtype of the scores, `mask.to(scores.dtype)`, before it is added,"
            " or raise."
        ),
    ),
)
