"""The MSK clauses: what a mask means. True = may attend, broadcastable to (B, H, L, S)."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MSK-1",
        level="MUST",
        title="Masked keys have no influence",
        statement=(
            "Replacing a masked key and its value with any finite numbers, however large, changes no output beyond "
            "the bound; on the CPU, where the operations stay the same, it changes no bit."
        ),
        source="Vaswani et al. 2017, section 3.2.3: masked connections are set to -infinity before the softmax",
        differs=(
            "Masking by -infinity meets this; F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 do, "
            "to the bit on the CPU for values of 1e30. Adding a finite number (-10000 in ONNX Runtime's contrib "
            "operator, -1e5 in tutorials) lets a huge masked score through."
        ),
    ),
    Clause(
        id="MSK-2",
        level="MUST",
        title="A masked key's weight is exactly zero",
        statement="The weight of a masked key is exactly 0. (Rows without any allowed key: MSK-8.)",
        source="Vaswani et al. 2017, section 3.2.3, with exp(-infinity) = 0",
        differs=(
            "A fill of -1e9 or of the dtype's lowest number underflows to 0 only beside an allowed key of ordinary "
            "score; in a row without one it gives masked keys positive weights (transformers eager, JAX, Flax)."
        ),
    ),
    Clause(
        id="MSK-3",
        level="MUST",
        title="Masking keys equals deleting them",
        statement="Masking keys gives the same result as deleting them (from key, value and mask).",
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: a key of weight 0 contributes neither to the sum nor to "
            "the normalisation"
        ),
        differs="",
    ),
    Clause(
        id="MSK-4",
        level="MUST",
        title="An all-True mask equals no mask",
        statement="A mask that allows every key gives the same result as no mask.",
        source="Follows from the meaning of the boolean mask; F.scaled_dot_product_attention documentation",
        differs=(
            "torch.nn.MultiheadAttention reads True the other way round (masked), so for it the mask without effect "
            "is all False. Kernels are often chosen by whether a mask is present at all, so the two calls may run "
            "different code."
        ),
    ),
    Clause(
        id="MSK-5",
        level="MUST",
        title="Broadcast masks equal expanded ones",
        statement="A broadcast mask equals the same mask expanded, for each broadcast pattern of B, H and L.",
        source=(
            "PyTorch documentation, broadcasting semantics; F.scaled_dot_product_attention documentation: the mask is "
            "broadcastable to the shape of the weights"
        ),
        differs=(
            "F.scaled_dot_product_attention 2.13 broadcasts any mask of two to four dimensions. "
            "torch.nn.MultiheadAttention broadcasts none: it takes exactly (L, S) or (B * H, L, S), and a (B, S) mask "
            "under the name `key_padding_mask`."
        ),
    ),
    Clause(
        id="MSK-6",
        level="MUST",
        title="Each mask entry acts on its place alone",
        statement=(
            "Mask entries may differ per batch item, per query and (where claimed) per head, and each acts on its own "
            "place alone."
        ),
        source=(
            "F.scaled_dot_product_attention documentation; defect class: only the first item's or head's mask is "
            "used, or a mask is read on the wrong axes"
        ),
        differs=(
            "Layouts in use include (B, S), (L, S), (B, L, S), (B * H, L, S), (B, 1, L, S) and (L, S, B). Where B = S "
            "or L = S, a mask read on the wrong axes raises nothing and is silently wrong: "
            "torch.nn.MultiheadAttention accepts a transposed `key_padding_mask` when B = S."
        ),
    ),
    Clause(
        id="MSK-7",
        level="MUST",
        title="No key position is special",
        statement="Masking works from the first key to the last: no position is special.",
        source="Defect class: off-by-one padding, and classification tokens that are never masked",
        differs="",
    ),
    Clause(
        id="MSK-8",
        level="MUST",
        title="Empty rows follow one declared policy",
        statement=(
            "A row with no allowed key follows the one policy that the implementation declares, on every path: "
            "`zeros` (zero context, so that the output is b_o), `nan`, `uniform` (the mean of all values) or `error`. "
            "That the policy is `zeros` is a SHOULD."
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
    ),
    Clause(
        id="MSK-9",
        level="MUST",
        title="Empty rows harm no other row",
        statement="A row with no allowed key changes no other row: neither the outputs nor the gradients.",
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: rows are computed apart; defect class: NaN gradients "
            "from an empty row (pytorch/pytorch#41508)"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 with `need_weights=True` violates it: a loss on a healthy item of the "
            "batch has NaN gradients for the input and the shared projection weights as soon as another item is "
            "wholly padded. With `need_weights=False` both are finite."
        ),
    ),
    Clause(
        id="MSK-10",
        level="SHOULD",
        title="NaN behind a mask stays there",
        statement=(
            "NaN or infinity in a masked key or value does not reach the output; NaN in an allowed key or value does."
        ),
        source="Follows from MSK-3, masked equals deleted; defect class: 0 * NaN = NaN (pytorch/pytorch#101967)",
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 (CPU) let NaN through from a masked "
            "key as well as from a masked value."
        ),
    ),
    Clause(
        id="MSK-11",
        level="MUST",
        title="Additive and boolean masks agree",
        statement=(
            "The additive (0 and -infinity) and the boolean form of one mask agree, where both are claimed. An "
            "additive mask with finite entries is a real bias on the scores."
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
    ),
    Clause(
        id="MSK-12",
        level="MUST",
        title="Unfit masks raise",
        statement=(
            "A mask whose shape cannot be broadcast raises. A mask of a dtype that is not claimed raises, rather than "
            "being reinterpreted."
        ),
        source="Defect class: a 0/1 integer mask added to the scores as if it were a bias",
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 refuse integer masks, uint8 "
            "included. Keras casts any mask to boolean, and a 0/1 float mask in torch is a bias of 1, not a mask."
        ),
    ),
)
