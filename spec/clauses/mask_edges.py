"""The MSK clauses from MSK-8 on: rows without keys, NaN behind a mask, forms of a mask, and masks that do not fit."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MSK-8",
        level="MUST",
        title="Empty rows follow one declared policy",
        statement=(
            "A row with no allowed key follows the one policy that the implementation declares, on every path, with "
            "dropout too: `zeros` (zero context, so that the output is b_o), `nan`, `uniform` (the mean of all "
            "values) or `error`. That the policy is `zeros` is a SHOULD."
        ),
        why=(
            "Such rows are routine: a wholly padded item, or a causal batch padded on the left. NaN there reaches "
            "other rows in the next layer, and a policy that changes with the path makes serving differ from training."
        ),
        source=(
            "Equation 1 of Vaswani et al. 2017 leaves 0/0 undefined; pytorch/pytorch#131060 chose zeros for "
            "F.scaled_dot_product_attention; defect class: pytorch/pytorch#103963, #160064"
        ),
        differs=(
            "F.scaled_dot_product_attention gives zeros since torch 2.5 (NaN before), as do flex_attention and ONNX "
            "Attention-23; JAX, Flax and transformers' eager code give the mean of all values; MLX the mean for a "
            "boolean mask and NaN for an additive one; timm zeros fused and NaN unfused. torch.nn.MultiheadAttention "
            "2.13 has no one policy: NaN with `need_weights=True`, b_o without, and NaN again on the inference fast "
            "path."
        ),
        violation=(
            "`scores.masked_fill(~mask, -1e9).softmax(-1)` where `zeros` is declared: all scores of an empty row are "
            "equal, so it gets the mean of all values."
        ),
    ),
    Clause(
        id="MSK-9",
        level="MUST",
        title="Empty rows harm no other row",
        statement=(
            "A row with no allowed key changes no other row: neither the outputs nor the gradients. Under the policy "
            '"nan" the gradient of W_o may be NaN, since a context that is NaN enters it.'
        ),
        why=(
            "Otherwise one wholly padded item in a large batch is enough to make the gradients of the shared weights "
            "NaN, and the optimiser's next step destroys the model."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: rows are computed apart; defect class: NaN gradients "
            "from an empty row (pytorch/pytorch#41508)"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 with `need_weights=True` violates it: a loss on a healthy item of the "
            "batch has NaN gradients for the input and the shared projection weights as soon as another item is "
            "wholly padded. With `need_weights=False` both are finite."
        ),
        violation=(
            "`(scores + mask).softmax(-1)` with an additive mask: an empty row is NaN, and in the backward pass it "
            "makes the gradients of W_q and W_k NaN, even for a loss on the other rows alone."
        ),
    ),
    Clause(
        id="MSK-10",
        level="SHOULD",
        title="NaN behind a mask stays there",
        statement=(
            "NaN or infinity in a masked key or value does not reach the output; NaN in an allowed key or value does."
        ),
        why=(
            "The padded tail of a buffer from `torch.empty`, or of a layer that gives NaN in empty rows, may hold NaN, "
            "which must stay there. NaN in a real token must show, and not become a plausible number."
        ),
        source="Follows from MSK-3, masked equals deleted; defect class: 0 * NaN = NaN (pytorch/pytorch#101967)",
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 (CPU) let NaN through from a masked "
            "key as well as from a masked value."
        ),
        violation=(
            "`weights @ v` where a masked value is NaN: its weight is exactly 0, but 0 * NaN is NaN, and so is the "
            "context."
        ),
    ),
    Clause(
        id="MSK-11",
        level="MUST",
        title="Additive and boolean masks agree",
        statement=(
            "The additive (0 and -infinity) and the boolean form of one mask agree, where both are claimed. An "
            "additive mask with finite entries is a real bias on the scores; the lowest number of the dtype is finite."
        ),
        why=(
            "Kernels want one form or the other, so callers convert; and ALiBi and relative positions come as finite "
            "additive masks. A form that is misread loses the positions, with no error."
        ),
        source=(
            "torch.nn.MultiheadAttention and F.scaled_dot_product_attention documentation: a float mask is added to "
            "the scores; defect class: a float mask converted to boolean (pytorch/pytorch#107084)"
        ),
        differs=(
            "torch.nn.MultiheadAttention's fast path once turned a float mask into a boolean one; 2.13 leaves the "
            "fast path for float masks. Keras casts its mask to boolean, transformers' eager code takes only additive "
            "masks, and ONNX Attention-23 takes both."
        ),
        violation=(
            "`scores.masked_fill(mask != 0, float('-inf'))` for an additive mask: a bias of 0.5 hides its key, where "
            "it should raise its score."
        ),
    ),
    Clause(
        id="MSK-12",
        level="MUST",
        title="Unfit masks raise",
        statement=(
            "A mask whose shape cannot be broadcast raises. A mask of a dtype that is not claimed raises, rather than "
            "being reinterpreted; one of numbers in another precision than the query's raises or is added."
        ),
        why=(
            "Tokenisers return masks of 0 and 1 as integers. A guess at what is meant hides nothing, or hides other "
            "tokens, and the model trains nevertheless, only worse."
        ),
        source="Defect class: a 0/1 integer mask added to the scores as if it were a bias",
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 refuse integer masks, uint8 "
            "included. In float64 their kernel for the CPU takes a mask of float32, and gives wrong numbers where the "
            "keys are more than a vector of the processor holds. Keras casts any mask to boolean, and a 0/1 float mask "
            "in torch is a bias of 1, not a mask."
        ),
        violation=(
            "`scores + mask` with an int64 mask of 0 and 1: a key marked 0 keeps 37% of the weight of an equal key "
            "marked 1."
        ),
    ),
)
