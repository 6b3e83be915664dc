"""The MSK clauses up to MSK-7: what a mask means. True = may attend, broadcastable to (B, H, L, S)."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MSK-1",
        level="MUST",
        title="Masked keys have no influence",
        statement=(
            "Replacing a masked key and its value with any finite numbers, however large, changes no output beyond "
            "the bound; on the CPU, where the operations stay the same, it changes no bit. (Rows without any allowed "
            "key: MSK-8.)"
        ),
        why=(
            "Masked positions hold padding, other documents, or tokens that are not to be seen yet. If they reach the "
            "output, information leaks, and a prediction changes with what it was batched with."
        ),
        source="Vaswani et al. 2017, section 3.2.3: masked connections are set to -infinity before the softmax",
        differs=(
            "Masking by -infinity meets this; F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 do, "
            "to the bit on the CPU for values of 1e30. Adding a finite number (-10000 in ONNX Runtime's contrib "
            "operator, -1e5 in tutorials) lets a huge masked score through."
        ),
        violation=(
            "`scores - 1e4 * ~mask`: a masked key whose score is 2e4 keeps 1e4, and takes all the weight from allowed "
            "keys of ordinary score."
        ),
    ),
    Clause(
        id="MSK-2",
        level="MUST",
        title="A masked key's weight is exactly zero",
        statement="The weight of a masked key is exactly 0. (Rows without any allowed key: MSK-8.)",
        why=(
            "A weight that is only small lets a huge value through, and makes a map of the weights show attention to "
            "padding."
        ),
        source="Vaswani et al. 2017, section 3.2.3, with exp(-infinity) = 0",
        differs=(
            "A fill of -1e9 or of the dtype's lowest number underflows to 0 only beside an allowed key of ordinary "
            "score; in a row without one it gives masked keys positive weights (transformers eager, JAX, Flax)."
        ),
        violation=(
            "`scores.masked_fill(~mask, -10)`: beside four allowed keys of score 0, a masked key has the weight 1.1e-5."
        ),
    ),
    Clause(
        id="MSK-3",
        level="MUST",
        title="Masking keys equals deleting them",
        statement=(
            "In a row with at least one allowed key, masking keys gives the same result as deleting them (from key, "
            "value and mask)."
        ),
        why=(
            "It is what makes batches of different lengths possible: an item padded to the longest gives what it gives "
            "alone. Otherwise an evaluation depends on its batch size."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: a key of weight 0 contributes neither to the sum nor to "
            "the normalisation"
        ),
        differs="",
        violation=(
            "`scores.softmax(-1) * mask`: masked keys still count in the denominator, so each context is scaled down "
            "from what it is with the keys deleted."
        ),
    ),
    Clause(
        id="MSK-4",
        level="MUST",
        title="An all-True mask equals no mask",
        statement="A mask that allows every key gives the same result as no mask.",
        why=(
            "A batch of equal lengths comes with an all-True mask from one data loader, and with none from another. If "
            "the two differ, results depend on who prepared the batch."
        ),
        source="Follows from the meaning of the boolean mask; F.scaled_dot_product_attention documentation",
        differs=(
            "torch.nn.MultiheadAttention reads True the other way round (masked), so for it the mask without effect "
            "is all False. Kernels are often chosen by whether a mask is present at all, so the two calls may run "
            "different code."
        ),
        violation=(
            "`scores.masked_fill(mask, float('-inf'))`, which takes True for masked: the all-True mask hides every "
            "key, and the output is NaN."
        ),
    ),
    Clause(
        id="MSK-5",
        level="MUST",
        title="Broadcast masks equal expanded ones",
        statement="A broadcast mask equals the same mask expanded, for each broadcast pattern of B, H and L.",
        why=(
            "A mask of (B, 1, 1, S) is stored where one of (B, H, L, S) would take gigabytes, so one model meets both "
            "forms. If they differ, saving memory changes results."
        ),
        source=(
            "PyTorch documentation, broadcasting semantics; F.scaled_dot_product_attention documentation: the mask is "
            "broadcastable to the shape of the weights"
        ),
        differs=(
            "F.scaled_dot_product_attention 2.13 broadcasts any mask of two to four dimensions. "
            "torch.nn.MultiheadAttention broadcasts none: it takes exactly (L, S) or (B * H, L, S), and a (B, S) mask "
            "under the name `key_padding_mask`."
        ),
        violation=(
            "`if mask.shape[2] == 1: mask = mask[:, :1]`: a mask of (B, H, 1, S) applies its first head to all heads; "
            "expanded to (B, H, L, S), with L > 1, it does not."
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
        why=(
            "Items are padded to different lengths, and packed documents see different keys. An entry that acts "
            "elsewhere hides real tokens and shows padding, and no shape gives it away."
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
        violation=(
            "`mask.repeat(H, 1, 1).view(B, H, L, S)` for a mask of (B, L, S): the heads of the first item get the "
            "masks of different items."
        ),
    ),
    Clause(
        id="MSK-7",
        level="MUST",
        title="No key position is special",
        statement="Masking works from the first key to the last: no position is special.",
        why=(
            "Left-padded batches mask the first keys, right-padded ones the last. Code that spares one position is "
            "right for one kind of batch, and lets every query see a padding token in the other."
        ),
        source="Defect class: off-by-one padding, and classification tokens that are never masked",
        differs="",
        violation=(
            "`mask | (torch.arange(S) == 0)`, so that a classification token is always seen: in a left-padded batch, "
            "every query attends to the padding in front."
        ),
    ),
)
