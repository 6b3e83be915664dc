"""The MSK clauses: what a mask means, rows without allowed keys, NaN behind a mask, and invalid
masks.

A canonical mask is boolean, True = may attend, and broadcastable to (B, H, L, S).
"""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="MSK-1",
        level="MUST",
        title="Masked keys have no influence",
        statement=(
            "Replacing a masked key and its value with any finite numbers, however large, changes"
            " no output beyond the bound, as long as its scores are finite. On the CPU, where the"
            " operations stay the same, it changes no bit. (For rows without any allowed key, see"
            " MSK-8.)"
        ),
        why=(
            "Masked positions hold padding, other documents, or future tokens. If they reach the"
            " output, information leaks, and a prediction depends on what it was batched with."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.3: masked connections are set to -infinity before the"
            " softmax"
        ),
        differs=(
            "Masking with -infinity satisfies this; F.scaled_dot_product_attention and"
            " torch.nn.MultiheadAttention 2.13 do so bit for bit on the CPU for values of 1e30."
            " Adding a finite number (-10000 in ONNX Runtime's contrib operator, -1e5 in tutorials)"
            " lets a huge masked score through."
        ),
        violation=(
            "`scores - 1e4 * ~mask`: a masked key whose score is 2e4 keeps 1e4, and takes all the"
            " weight from allowed keys with ordinary scores."
        ),
        fix=(
            '`scores.masked_fill(~mask, float("-inf"))` before the softmax, where True = may'
            " attend, on every code path and along the axis of the keys; a finite number is not low"
            " enough."
        ),
    ),
    Clause(
        id="MSK-2",
        level="MUST",
        title="A masked key's weight is exactly zero",
        statement=(
            "The weight of a masked key is exactly 0. (For rows without any allowed key, see"
            " MSK-8.)"
        ),
        why=(
            "A weight that is merely small lets a huge value through, and makes a map of the"
            " weights show attention to padding."
        ),
        source="Vaswani et al. 2017, section 3.2.3, with exp(-infinity) = 0",
        differs=(
            "A fill of -1e9, or of the dtype's lowest number, underflows to 0 only next to an"
            " allowed key with an ordinary score; in a row without one, it gives masked keys"
            " positive weights (transformers eager, JAX, Flax)."
        ),
        violation=(
            "`scores.masked_fill(~mask, -10)`: next to four allowed keys with score 0, a masked key"
            " has weight 1.1e-5."
        ),
        fix=(
            '`scores.masked_fill(~mask, float("-inf"))` before the softmax; treat rows without an'
            " allowed key separately."
        ),
    ),
    Clause(
        id="MSK-3",
        level="MUST",
        title="Masking keys equals deleting them",
        statement=(
            "In a row with at least one allowed key, masking keys gives the same result as deleting"
            " them (from key, value and mask)."
        ),
        why=(
            "This makes batches of different lengths possible: an item padded to the longest length"
            " gives the same result as on its own. Otherwise an evaluation depends on its batch"
            " size."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: a key of weight 0 contributes neither"
            " to the sum nor to the normalisation"
        ),
        differs="",
        violation=(
            "`scores.softmax(-1) * mask`: masked keys still count in the denominator, so each"
            " context is scaled down compared with deleting the keys."
        ),
        fix=(
            "Mask before the softmax, so that masked keys are in neither the sum nor the"
            " denominator; where code uses the number of keys, count the allowed ones."
        ),
    ),
    Clause(
        id="MSK-4",
        level="MUST",
        title="An all-True mask equals no mask",
        statement="A mask that allows every key gives the same result as no mask.",
        why=(
            "For a batch of equal lengths, one data loader gives an all-True mask and another gives"
            " none. If the two differ, results depend on who prepared the batch."
        ),
        source=(
            "Follows from the meaning of the boolean mask; F.scaled_dot_product_attention"
            " documentation"
        ),
        differs=(
            "In torch.nn.MultiheadAttention, True means masked, so the mask without effect is all"
            " False. Kernels are often chosen by whether a mask is present at all, so the two calls"
            " may run different code."
        ),
        violation=(
            "`scores.masked_fill(mask, float('-inf'))`, which takes True to mean masked: the"
            " all-True mask hides every key, and the output is NaN."
        ),
        fix=(
            "Check which way round the mask is (True = may attend, or what the adapter declares as"
            " `mask`), and use one code path with and without a mask."
        ),
    ),
    Clause(
        id="MSK-5",
        level="MUST",
        title="Broadcast masks equal expanded ones",
        statement=(
            "A broadcast mask gives the same result, within the bound, as the same mask expanded,"
            " for each broadcast pattern of B, H and L. On the CPU, masks of one shape in different"
            " memory layouts give the same bits. A mask that is broadcast over the keys either"
            " gives that result or raises."
        ),
        why=(
            "A (B, 1, 1, S) mask is stored where a (B, H, L, S) mask would take gigabytes, so one"
            " model meets both forms. If they differ, saving memory changes results."
        ),
        source=(
            "PyTorch documentation, broadcasting semantics; F.scaled_dot_product_attention"
            " documentation: the mask is broadcastable to the shape of the weights"
        ),
        differs=(
            "F.scaled_dot_product_attention 2.13 broadcasts any mask of two to four dimensions."
            " torch.nn.MultiheadAttention broadcasts none: it takes exactly (L, S) or (B * H, L,"
            " S), and a (B, S) mask as `key_padding_mask`."
        ),
        violation=(
            "`if mask.shape[2] == 1: mask = mask[:, :1]`: a (B, H, 1, S) mask applies its first"
            " head to all heads; expanded to (B, H, L, S) with L > 1, it does not."
        ),
        fix=(
            "Broadcast once, `mask = mask.expand(B, H, L, S)` or by arithmetic on the scores; code"
            " that is selected by the mask's shape must give the same result."
        ),
    ),
    Clause(
        id="MSK-6",
        level="MUST",
        title="Each mask entry affects only its own position",
        statement=(
            "Mask entries may differ per batch item, per query and (where claimed) per head, and"
            " each applies only to its own item, query, head and key."
        ),
        why=(
            "Items are padded to different lengths, and packed documents see different keys. An"
            " entry applied to another position hides real tokens and exposes padding, and the"
            " shapes do not show it."
        ),
        source=(
            "F.scaled_dot_product_attention documentation; known bugs: only the first item's or"
            " head's mask is used, or a mask is read along the wrong axes"
        ),
        differs=(
            "Layouts in use include (B, S), (L, S), (B, L, S), (B * H, L, S), (B, 1, L, S) and (L,"
            " S, B). Where B = S or L = S, a mask read along the wrong axes raises nothing and is"
            " silently misapplied: torch.nn.MultiheadAttention accepts a transposed"
            " `key_padding_mask` when B = S."
        ),
        violation=(
            "`mask.repeat(H, 1, 1).view(B, H, L, S)` for a mask of shape (B, L, S): the heads of"
            " the first item get the masks of different items."
        ),
        fix=(
            "Give the mask its missing axes at the correct places: `mask[:, None]` for (B, L, S),"
            " `mask[:, None, None]` for (B, S); for (B * H, L, S), `repeat_interleave(H, 0)`, not"
            " `repeat`."
        ),
    ),
    Clause(
        id="MSK-7",
        level="MUST",
        title="No key position is special",
        statement="Masking works for every key from the first to the last: no position is exempt.",
        why=(
            "Left-padded batches mask the first keys, right-padded ones the last. Code that exempts"
            " one position works for one kind of batch, and lets every query see a padding token in"
            " the other."
        ),
        source="Known bugs: off-by-one padding, and classification tokens that are never masked",
        differs="",
        violation=(
            "`mask | (torch.arange(S) == 0)`, to keep a classification token visible: in a"
            " left-padded batch, every query attends to the padding in front."
        ),
        fix=(
            "Apply the mask to all S keys: check the ends of slices and tiles, and remove the"
            " exception for a position."
        ),
    ),
    Clause(
        id="MSK-8",
        level="MUST",
        title="Empty rows follow one declared policy",
        statement=(
            "A row with no allowed key follows the one policy that the implementation declares, on"
            " every code path, also with dropout: `zeros` (the context is zero, so the output is"
            " b_o), `nan`, `uniform` (the mean of all values) or `error`. The policy SHOULD be"
            " `zeros`."
        ),
        why=(
            "Such rows are routine: a fully padded item, or a causal batch padded on the left. NaN"
            " there reaches other rows in the next layer, and a policy that changes with the code"
            " path makes serving differ from training."
        ),
        source=(
            "Equation 1 of Vaswani et al. 2017 leaves 0/0 undefined; pytorch/pytorch#131060 chose"
            " zeros for F.scaled_dot_product_attention; known bugs: pytorch/pytorch#103963, #160064"
        ),
        differs=(
            "F.scaled_dot_product_attention has given zeros since torch 2.5 (NaN before), as do"
            " flex_attention and ONNX Attention-23. JAX, Flax and transformers' eager code give the"
            " mean of all values; MLX gives the mean for a boolean mask and NaN for an additive"
            " one; timm gives zeros when fused and NaN when not. torch.nn.MultiheadAttention 2.13"
            " has no single policy: NaN with `need_weights=True`, b_o without, and NaN again on the"
            " inference fast path."
        ),
        violation=(
            "`scores.masked_fill(~mask, -1e9).softmax(-1)` where `zeros` is declared: all scores of"
            " an empty row are equal, so it gets the mean of all values."
        ),
        fix=(
            "Zero the masked weights after the softmax, on every path: `scores.masked_fill(~mask,"
            ' float("-inf")).softmax(-1).masked_fill(~mask, 0.0)` (zeroing only the context leaves'
            " NaN in the gradients of the values); or declare what it does with"
            " `Claims(empty_row=...)`."
        ),
    ),
    Clause(
        id="MSK-9",
        level="MUST",
        title="Empty rows do not affect other rows",
        statement=(
            "A row with no allowed key changes neither the outputs nor the gradients of any other"
            " row. Under the policy `nan` of MSK-8 the gradients are a SHOULD, and that of W_o may"
            " be NaN, since a NaN context enters it."
        ),
        why=(
            "Otherwise a single fully padded item in a large batch makes the gradients of the"
            " shared weights NaN, and the optimiser's next step destroys the model."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: each row is computed separately; known"
            " bug: NaN gradients from an empty row (pytorch/pytorch#41508)"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 with `need_weights=True` violates it: if one item of"
            " a batch is fully padded, a loss on another, healthy item has NaN gradients for the"
            " input and the shared projection weights. With `need_weights=False`, both are finite."
        ),
        violation=(
            "`(scores + mask).softmax(-1)` with an additive mask: an empty row is NaN, and the"
            " backward pass makes the gradients of W_q and W_k NaN, even for a loss on the other"
            " rows alone."
        ),
        fix=(
            "Keep empty rows out of the softmax instead of repairing its NaN: unmask such a row"
            " before the softmax, and set its weights to zero after it."
        ),
    ),
    Clause(
        id="MSK-10",
        level="SHOULD",
        title="NaN at masked positions does not leak",
        statement="NaN or infinity in a masked key or value does not reach the output.",
        why=(
            "The padded tail of a buffer from `torch.empty`, or of a layer that gives NaN in empty"
            " rows, may hold NaN, which must not spread."
        ),
        source=(
            "Follows from MSK-3 (masking equals deleting); known bug: 0 * NaN = NaN"
            " (pytorch/pytorch#101967)"
        ),
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 (CPU) let NaN"
            " through from a masked key as well as from a masked value."
        ),
        violation=(
            "`weights @ v` where a masked value is NaN: its weight is exactly 0, but 0 * NaN is"
            " NaN, and so is the context."
        ),
        fix=(
            "Fill masked scores instead of adding to them, since NaN + -infinity is NaN, and set"
            " values that no query may attend to to zero, since 0 * NaN is NaN:"
            " `v.masked_fill(~mask.any(-2)[..., None], 0)`, with a mask of four dimensions."
        ),
    ),
    Clause(
        id="MSK-11",
        level="MUST",
        title="Additive and boolean masks agree",
        statement=(
            "The additive form (0 and -infinity) and the boolean form of one mask agree, where both"
            " are claimed. An additive mask with finite entries is a real bias on the scores. The"
            " lowest number of the dtype is finite, so a row of it SHOULD have weights that sum"
            " to 1."
        ),
        why=(
            "Some kernels want one form and some the other, so callers convert; ALiBi and relative"
            " positions come as finite additive masks. If a form is misread, the positions are lost"
            " without an error."
        ),
        source=(
            "torch.nn.MultiheadAttention and F.scaled_dot_product_attention documentation: a float"
            " mask is added to the scores; known bug: a float mask converted to boolean"
            " (pytorch/pytorch#107084)"
        ),
        differs=(
            "The fast path of torch.nn.MultiheadAttention once turned a float mask into a boolean"
            " one; 2.13 leaves the fast path for float masks. Keras casts its mask to boolean,"
            " transformers' eager code takes only additive masks, and ONNX Attention-23 takes both."
        ),
        violation=(
            "`scores.masked_fill(mask != 0, float('-inf'))` for an additive mask: a bias of 0.5"
            " hides its key instead of raising its score."
        ),
        fix=(
            "Branch on `mask.dtype`: `masked_fill` for a boolean mask, and `scores + mask` for a"
            " floating-point one."
        ),
    ),
    Clause(
        id="MSK-12",
        level="SHOULD",
        kind="refusals",
        title="Invalid masks raise",
        statement=(
            "A mask whose shape cannot be broadcast to (B, H, L, S) raises. A mask of a dtype that"
            " is not claimed raises instead of being reinterpreted."
        ),
        why=(
            "Tokenisers return masks of integers, 0 and 1, and of shape (B, S). If code guesses"
            " what is meant, it hides nothing or the wrong tokens, and the model still trains, only"
            " worse."
        ),
        source="Known bug: a 0/1 integer mask added to the scores as if it were a bias",
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 reject integer"
            " masks, including uint8; transformers' eager code adds them to the scores, and Keras"
            " casts any mask to boolean. In torch, a 0/1 float mask is a bias of 1, not a mask."
        ),
        violation=(
            "`scores + mask` with an int64 mask of 0 and 1: a key marked 0 keeps 37% of the weight"
            " of an equal key marked 1."
        ),
        fix=(
            "Check the dtype and the shape of the mask in `forward`, and raise for what is not"
            " supported; or declare what is, with `Claims(masks=...)`, where 'int' means integers"
            " that count as booleans."
        ),
        accepts="masks of a wrong shape or dtype",
    ),
)
