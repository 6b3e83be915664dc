"""The PTH clauses: one result, whichever code runs."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="PTH-1",
        level="MUST",
        title="need_weights does not change the output",
        statement="`need_weights` on or off gives the same output, for every mask, causal flag and gradient mode.",
        why=(
            "Weights are requested to debug and to draw maps, and not in production. If that changes the output, what "
            "the notebook shows is not what the service computes."
        ),
        source=(
            "Defect class: pytorch/pytorch#160064, #127055 and #99282, where `need_weights` alone changed the result"
        ),
        differs=(
            "In torch.nn.MultiheadAttention 2.13 it selects the code: explicit softmax with `need_weights=True` (the "
            "default), F.scaled_dot_product_attention without. They differ on rows without an allowed key (NaN "
            "against b_o), and on `is_causal=True` beside a mask that is not the causal one. Keras also takes another "
            "path when scores are requested."
        ),
        violation=(
            "A fused kernel that gives zeros for an empty row without weights, beside an explicit softmax that gives "
            "NaN there with `need_weights=True`."
        ),
    ),
    Clause(
        id="PTH-2",
        level="MUST",
        title="Modes do not change the output",
        statement=(
            "Training mode (without dropout), eval mode, eval under `no_grad` and eval under `inference_mode` give "
            "the same output, for every mask, empty rows included."
        ),
        why=(
            "A model is trained in one mode, validated in another and served in a third. A mode that selects other "
            "code puts into service a model that nobody has evaluated."
        ),
        source=(
            "torch.nn.Module.eval and torch.no_grad documentation: the modes change dropout and recording only; "
            "defect class: pytorch/pytorch#106630, #86120"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 takes a fast path in eval mode without gradients, for one tensor as "
            "query, key and value, batch first, an even number of heads and no float mask. There a wholly padded item "
            "gives NaN with `need_weights=False`; with a clone as the key, or an odd number of heads, it gives b_o."
        ),
        violation=(
            "`if not torch.is_grad_enabled(): return self.fast(query)`, where `fast` takes no mask: under `no_grad` "
            "the padding is attended to, in training it is not."
        ),
    ),
    Clause(
        id="PTH-3",
        level="MUST",
        title="Every form of one mask agrees",
        statement=(
            "One mask given as boolean, as 0/-infinity float, broadcast, expanded, or as a causal flag gives the same "
            "output, alone and combined with a padding mask."
        ),
        why=(
            "The form is a matter of convenience: a data loader gives booleans, a framework floats, a kernel wants a "
            "flag. If it matters, tidying the code changes the model."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (forms of the mask); defect class: pytorch/pytorch#107084, "
            "#97409"
        ),
        differs=(
            "In torch.nn.MultiheadAttention a float mask leaves the fast path that a boolean mask takes, so with "
            "`need_weights=False` the mask's form decides between NaN (boolean) and b_o (float) for a row without an "
            "allowed key; mixing a boolean padding mask with a float mask is deprecated. MLX gives the mean for a "
            "boolean and NaN for an additive mask there."
        ),
        violation=(
            "`mask & causal` where the mask is boolean, and the mask alone where it is a float: a padding mask given "
            "as 0 and -infinity lets queries see the future."
        ),
    ),
    Clause(
        id="PTH-4",
        level="MUST",
        title="A hint never overrides the mask",
        statement=(
            "A hint (such as `is_causal` beside an explicit mask) never overrides the mask: the result is that of "
            "both, or the call raises."
        ),
        why=(
            "A hint is given for speed. If it wins over the mask, packed documents and prefixes are masked by a "
            "triangle that nobody asked for."
        ),
        source="Defect class: a flag trusted more than the data (pytorch/pytorch#99282, #178588)",
        differs=(
            "In torch.nn.MultiheadAttention 2.13, `is_causal=True` with `need_weights=False` and no padding mask "
            "drops `attn_mask` and attends causally, whatever the mask says; with `need_weights=True` the mask alone "
            "counts. Its documentation warns that a wrong hint gives wrong results. In timm's unfused attention "
            "`is_causal` takes precedence over the mask."
        ),
        violation=(
            "`if is_causal: mask = None`, to reach a kernel's causal path: the mask between two packed documents is "
            "dropped, and the second attends to the first."
        ),
    ),
    Clause(
        id="PTH-5",
        level="MUST",
        title="Optional extras do not change the rest",
        statement=(
            "The result does not depend on which optional extras are switched on (bias of keys and values, extra zero "
            "key, batch first, 2-D inputs), where they are claimed: each matches the oracle, and any two together."
        ),
        why=(
            "A pretrained model comes with its extras, and they change the number of keys or the layout. One that "
            "shifts the mask by a key, or transposes an input, spoils results that seem unrelated to it."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (`add_bias_kv`, `add_zero_attn`, `batch_first`); defect class: "
            "pytorch/pytorch#27461"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 with `add_zero_attn` or `add_bias_kv` appends a key at the end; with "
            "`is_causal=True` and `need_weights=False` the top-left causal flag then hides that key, and the result "
            "differs from the same call without the hint."
        ),
        violation=(
            "`F.pad(mask, (0, 1))` for the extra zero key, where True means allowed: the padding is False, so the "
            "extra key is never seen."
        ),
    ),
)
