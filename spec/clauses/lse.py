"""The LSE clauses: the log-sum-exp of the scores beside the context."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="LSE-1",
        level="MAY",
        title="The log-sum-exp is that of the scores",
        statement=(
            "The log-sum-exp that a call returns is the logarithm, to the declared base, of the sum"
            " of the exponentials of the scaled and masked scores of each row, in the declared"
            " dtype and layout; that of a row without a key is the declared one. The context is"
            " right beside it."
        ),
        why=(
            "Ring attention, split keys and cascades merge partial contexts by their log-sum-exps,"
            " and a backward pass recomputes the weights from it. In another base, or of other"
            " scores, it weighs the parts wrongly."
        ),
        source=(
            "Milakov & Gimelshein 2018; Dao et al. 2022; flash-attention (`return_softmax_lse`),"
            " FlashInfer (`return_lse`)"
        ),
        differs=(
            "Flash-attention and PyTorch return natural logarithms, FlashInfer those to base 2. For"
            " a row without a key flash-attention has infinity, others -infinity; PyTorch's flash"
            " kernel for the CPU has 0."
        ),
        violation=(
            "`lse = m / math.log(2) + torch.log2(total)` where the caller takes `torch.exp(lse)`:"
            " base 2, read as base e."
        ),
        fix=(
            "Return `m + torch.log(total)`, of the scores that the softmax has, in float32; or"
            ' declare `Lse(base="2")`.'
        ),
    ),
    Clause(
        id="LSE-2",
        level="MAY",
        title="Parts of the keys merge to the whole",
        statement=(
            "For any split of the keys into parts, contexts and log-sum-exps of the parts, merged"
            " by the weights 2^lse or e^lse of their base, give those of all keys: also where one"
            " part, or two in succession, have no key that a row may attend to, and where all"
            " scores are lower than any number that stands for none."
        ),
        why=(
            "Split keys, cascades of prefixes and ring attention are correct only if their merge"
            " is. A merge of two empty parts is 0/0, and a part whose scores are all below a"
            " sentinel such as -1e4 is lost."
        ),
        source=(
            "Milakov & Gimelshein 2018, section 3.1; FlashInfer (`merge_state`); SGLang and vLLM"
            " (`merge_attn_states`)"
        ),
        differs=(
            "FlashInfer's log-sum-exps are to base 2, flash-attention's natural. Where both parts"
            " are empty, some merges give NaN, others zeros."
        ),
        violation=(
            "`m = maximum(lse_a, lse_b); w = exp(lse_a - m)`: for two empty parts, -inf - -inf is"
            " NaN."
        ),
        fix=(
            "Subtract a maximum that is finite: `m = maximum(lse_a, lse_b)`, then"
            " `m = m.masked_fill(m == -inf, 0)`, and divide by the sum only where it is not 0."
        ),
    ),
    Clause(
        id="LSE-3",
        level="MAY",
        title="The log-sum-exp has its gradient",
        statement=(
            "Where it is claimed (`Lse(gradient=True)`), the gradients of a loss of context and"
            " log-sum-exp match the oracle's within the bound: the row's weights, times the"
            " gradient of its log-sum-exp, are added to the gradients of the scores."
        ),
        why=(
            "Merged parts of a row, and a z-loss, are differentiated through the log-sum-exp. If"
            " that gradient is lost, training goes on, with gradients of something else."
        ),
        source=(
            "PyTorch documentation of flex_attention (`return_lse`); the softmax is the derivative"
            " of log sum exp"
        ),
        differs=(
            "flex_attention differentiates it; flash-attention 2 and PyTorch's kernels do not, and"
            " return one without history."
        ),
        violation=(
            "`lse.detach()`, or a backward pass that takes one gradient: that of the log-sum-exp is"
            " dropped."
        ),
        fix=(
            "Subtract the gradient of the log-sum-exp from D in the backward pass: `ds = p * (dp -"
            " (d - dlse))`."
        ),
    ),
)
