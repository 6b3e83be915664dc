"""The CAU clauses: no query sees a later key."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CAU-1",
        level="MUST",
        title="The future does not affect the past",
        statement=(
            "With a causal mask, changing position j changes no output at i < j. Beside an additive"
            " mask it SHOULD not do so either where the keys up to i have the lowest number, which"
            " is finite."
        ),
        why=(
            "A decoder that sees the next token copies it: its training loss is excellent, but it"
            " generates nonsense, since the next token is not there yet."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.3: leftward information flow is prevented in the"
            " decoder"
        ),
        differs="",
        violation=(
            "`torch.ones(L, S).tril(1)` as the mask: each query also sees the key after it, which"
            " is the token it has to predict."
        ),
        fix=(
            "`torch.ones(L, S, dtype=torch.bool, device=query.device).tril()` as the allowed keys"
            " (`tril(S - L)` for `bottom_right`), applied before the softmax on every path."
        ),
    ),
    Clause(
        id="CAU-2",
        level="MUST",
        title="is_causal equals the lower-triangular mask",
        statement=(
            "`is_causal=True` gives the same result as the explicit lower-triangular mask,"
            " including the diagonal."
        ),
        why=(
            "Training uses the flag, for its fast kernels, while export or evaluation uses an"
            " explicit mask. If the two differ by the diagonal, the model that runs is not the one"
            " that was trained."
        ),
        source=(
            "F.scaled_dot_product_attention documentation, argument `is_causal`; Vaswani et al."
            " 2017, section 3.2.3"
        ),
        differs=(
            "In torch.nn.MultiheadAttention, `is_causal` is a hint about the mask passed with it."
            " Without `attn_mask`, 2.13 raises, but on the inference fast path (one tensor as"
            " query, key and value, no gradient) it silently computes full attention."
        ),
        violation=(
            "`torch.ones(L, S).tril(-1)` behind the flag: no query sees its own position, and the"
            " first sees nothing."
        ),
        fix=(
            "Include the diagonal: `tril()` for what is allowed, or `triu(1)` for what is masked;"
            " and apply the flag on every path."
        ),
    ),
    Clause(
        id="CAU-3",
        level="MUST",
        title="Causal alignment is as declared",
        statement=(
            "With L != S, the declared alignment (`top_left` or `bottom_right`) holds, or the call"
            " raises."
        ),
        why=(
            "Decoding with a cache has one query and many keys. With an unexpected alignment"
            " nothing raises: the model forgets all but the first token, or sees the future."
        ),
        source=(
            "F.scaled_dot_product_attention and torch.nn.attention.bias documentation; known bug:"
            " an alignment that changed between versions (Dao-AILab/flash-attention#951)"
        ),
        differs=(
            "F.scaled_dot_product_attention, JAX, Keras and ONNX Attention-23 align top-left; MLX,"
            " and FlashAttention since 2.1, align bottom-right; x-transformers differs between its"
            " plain and its flash path. With one query and many keys, top-left sees only the first"
            " key and bottom-right sees all."
        ),
        violation=(
            "`torch.ones(L, S).tril(S - L)` where `top_left` is declared: with L = 1 and S = 5, the"
            " query sees five keys instead of one."
        ),
        fix=(
            "Make the mask with the declared alignment, `tril()` for `top_left` and `tril(S - L)`"
            " for `bottom_right`; or declare the other one with `Claims(causal=...)`."
        ),
    ),
    Clause(
        id="CAU-4",
        level="MUST",
        title="Causal and padding masks combine",
        statement="A causal mask and a padding mask together act as their logical AND.",
        why=(
            "Decoder batches are causal and padded at once. If one mask replaces the other, queries"
            " see padding or the future, and only in the batches that have padding."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.3; Keras MultiHeadAttention documentation"
            " (`use_causal_mask`); known bug: pytorch/pytorch#100709"
        ),
        differs=(
            "Keras combines all its masks by AND. In 2.13, F.scaled_dot_product_attention combines"
            " a mask with `is_causal=True` in its CPU flash kernel, whereas its math backend"
            " raises. torch.nn.MultiheadAttention merges `key_padding_mask` and `attn_mask`."
        ),
        violation=(
            "`if mask is None: mask = causal`: a padding mask replaces the causal one, and every"
            " query sees the future."
        ),
        fix=(
            "Combine the masks instead of replacing one by the other: with `&` where True = may"
            " attend, with `|` where True = masked, by addition where they are additive."
        ),
    ),
    Clause(
        id="CAU-5",
        level="MUST",
        title="Past outputs send no gradient to future inputs",
        statement=(
            "With a causal mask, the gradient of output i with respect to every input at j > i is"
            " exactly 0."
        ),
        why=(
            "Outputs can be correct while the backward pass is not. The model is then trained on"
            " the gradient of another function, and nothing in its outputs shows why it learns"
            " badly."
        ),
        source=(
            "Follows from CAU-1: the derivative of a constant function; known bug: a backward pass"
            " without the forward pass's mask"
        ),
        differs="",
        violation=(
            "A backward pass that recomputes the weights as `exp(scores - logsumexp)` without the"
            " mask: keys after the query get a gradient."
        ),
        fix="In a hand-written backward pass, apply the causal mask to the recomputed weights too.",
    ),
)
