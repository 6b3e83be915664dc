"""The PTH clauses: one result, whichever code runs."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="PTH-1",
        level="MUST",
        title="need_weights does not change the output",
        statement=(
            "The output is the same with `need_weights` on or off, for every mask, causal flag and"
            " gradient mode. (For rows without any allowed key, see MSK-8.)"
        ),
        why=(
            "Weights are requested for debugging and for attention maps, not in production. If that"
            " changes the output, the notebook does not show what the service computes."
        ),
        source=(
            "Known bugs: pytorch/pytorch#160064, #127055 and #99282, where `need_weights` alone"
            " changed the result"
        ),
        differs=(
            "In torch.nn.MultiheadAttention 2.13, `need_weights` selects the code: an explicit"
            " softmax with `need_weights=True` (the default), F.scaled_dot_product_attention"
            " without. They differ on rows without an allowed key (NaN versus b_o), and on"
            " `is_causal=True` with a mask that is not the causal one. Keras also takes another"
            " code path when scores are requested."
        ),
        violation=(
            "`F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)` without weights, where"
            " the explicit softmax for `need_weights=True` adds the mask: the mask is lost without"
            " weights."
        ),
        fix=(
            "Use the same masks, scale and empty-row policy with and without weights, and compare"
            " the outputs of both paths in a test."
        ),
    ),
    Clause(
        id="PTH-2",
        level="MUST",
        title="Training and gradient modes agree",
        statement=(
            "Training mode (without dropout), eval mode, eval mode under `no_grad` and eval mode"
            " under `inference_mode` give the same output, for every mask. (For rows without any"
            " allowed key, see MSK-8.)"
        ),
        why=(
            "A model is trained in one mode, validated in another and served in a third. If a mode"
            " selects other code, the model that is served is one that nobody has evaluated."
        ),
        source=(
            "torch.nn.Module.eval and torch.no_grad documentation: the modes change only dropout"
            " and recording; known bugs: pytorch/pytorch#106630, #86120"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 takes a fast path in eval mode without gradients, for"
            " one tensor as query, key and value, batch first, an even number of heads and no float"
            " mask. There a fully padded item gives NaN with `need_weights=False`; with a clone as"
            " the key, or an odd number of heads, it gives b_o."
        ),
        violation=(
            "`if not torch.is_grad_enabled(): return self.fast(query)`, where `fast` takes no mask:"
            " padding is attended to under `no_grad`, but not in training."
        ),
        fix=(
            "Do not select a path by `self.training` or `torch.is_grad_enabled()` unless it handles"
            " every mask; only dropout depends on the mode."
        ),
    ),
    Clause(
        id="PTH-3",
        level="MUST",
        title="Every form of one mask agrees",
        statement=(
            "One mask gives the same output as a boolean mask, as a 0/-infinity float mask, as 1"
            " and 0 in integers, broadcast, expanded, or as a causal flag, alone and combined with"
            " a padding mask, in each form that is claimed."
        ),
        why=(
            "The form is a matter of convenience: a data loader gives booleans, a framework floats,"
            " and a kernel wants a flag. If the form matters, refactoring changes the model."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (forms of the mask); known bugs:"
            " pytorch/pytorch#107084, #97409"
        ),
        differs=(
            "In torch.nn.MultiheadAttention, a float mask leaves the fast path that a boolean mask"
            " takes. So with `need_weights=False`, the form of the mask decides between NaN"
            " (boolean) and b_o (float) for a row without an allowed key; mixing a boolean padding"
            " mask with a float mask is deprecated. In such a row, MLX gives the mean for a boolean"
            " mask and NaN for an additive one."
        ),
        violation=(
            "`mask & causal` for a boolean mask, but the mask alone for a float one: a padding mask"
            " given as 0 and -infinity lets queries see the future."
        ),
        fix=(
            "Bring every mask to one form at the top of `forward`, boolean or additive, of four"
            " dimensions and with the causal mask in it, and use only that."
        ),
    ),
    Clause(
        id="PTH-4",
        level="MUST",
        title="A hint never overrides the mask",
        statement=(
            "A hint (such as `is_causal` with an explicit mask) never overrides the mask: either"
            ' both apply, or the call raises. Where `causal_with_mask="mask_alone"` is claimed, the'
            " mask applies alone."
        ),
        why=(
            "A hint is given for speed. If it wins over the mask, packed documents and prefixes are"
            " masked by a triangle that nobody asked for."
        ),
        source="Known bug: a flag trusted more than the data (pytorch/pytorch#99282, #178588)",
        differs=(
            "In torch.nn.MultiheadAttention 2.13, `is_causal=True` with `need_weights=False` and no"
            " padding mask drops `attn_mask` and attends causally, whatever the mask says; with"
            " `need_weights=True`, only the mask counts. Its documentation warns that an incorrect"
            " hint gives incorrect results. In timm's unfused attention, `is_causal` takes"
            " precedence over the mask. Beside FlashInfer's `custom_mask`, the flag does not count,"
            " as its documentation says."
        ),
        violation=(
            "`if is_causal: mask = None`, to reach a kernel's causal path: the mask between two"
            " packed documents is dropped, and the second attends to the first."
        ),
        fix="Combine the flag with the mask, or raise when both are given; never drop one of them.",
    ),
    Clause(
        id="PTH-5",
        level="MUST",
        title="Optional extras change nothing else",
        statement=(
            "Optional extras (bias of keys and values, extra zero key, batch first, 2-D inputs),"
            " where claimed, change nothing else: the result matches the oracle with each of them,"
            " and with any two together."
        ),
        why=(
            "Pretrained models come with such extras, which change the number of keys or the"
            " layout. One that shifts the mask by a key, or transposes an input, breaks results"
            " that seem unrelated to it."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (`add_bias_kv`, `add_zero_attn`,"
            " `batch_first`); known bug: pytorch/pytorch#27461"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 with `add_zero_attn` or `add_bias_kv` appends a key"
            " at the end. With `is_causal=True` and `need_weights=False`, the top-left causal flag"
            " then hides that key, and the result differs from the same call without the hint."
        ),
        violation=(
            "`F.pad(mask, (0, 1))` for the extra zero key, where True means allowed: the padding is"
            " False, so the extra key is never seen."
        ),
        fix=(
            "Extend key, value and mask together, so that the extra keys are allowed, and undo each"
            " change of layout before returning."
        ),
    ),
)
