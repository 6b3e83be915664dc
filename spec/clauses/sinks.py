"""The SNK clauses: a sink takes a part of the weight of each row."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SNK-1",
        level="MAY",
        title="A sink takes part in the denominator only",
        statement=(
            "With a sink z of a head, its weights are exp(s_j) / (sum_l exp(s_l) + exp(z)), and the"
            " sink adds nothing to the context. Each query head has its own, grouped heads too. A"
            " sink of -infinity is none. With a finite one, a query without an allowed key gets a"
            " context of zeros."
        ),
        why=(
            "gpt-oss was trained with sinks: without them, or with those of another head, each row"
            " has the wrong mass, and texts get worse the longer they are."
        ),
        source=(
            "Xiao et al. 2023 (attention sinks); Miller 2023 (softmax plus one); gpt-oss model card"
        ),
        differs=(
            "transformers calls them `s_aux`, which its SDPA function takes and ignores."
            " FlashAttention-4 takes them in the inputs' dtype or float32, FlashInfer in float32."
            " FlashAttention-4's log-sum-exp has the sink in it."
        ),
        violation=(
            "`softmax(cat([scores, z]))` whose last column is not removed, or is multiplied by the"
            " last value."
        ),
        fix="Add exp(z - m) to the sum of each row once, with m the maximum of the row and of z.",
    ),
    Clause(
        id="SNK-2",
        level="MAY",
        title="A sink has its gradient",
        statement=(
            "The gradient of the sink of a head is -sum_i p_i (dO_i . o_i), with p_i the weight of"
            " the sink in row i, where sinks require a gradient. Those of query, key and value are"
            " those of the weights with the sink."
        ),
        why=(
            "Sinks are learned. Without a gradient they stay as they were initialised, and no error"
            " says so."
        ),
        source="the derivative of the softmax; known bug: Dao-AILab/flash-attention#1973",
        differs=(
            "FlashAttention-3 forks take sinks in the forward pass only. MLX differentiates them."
        ),
        violation=(
            "A backward pass written for a softmax without a sink returns None for it, or zeros."
        ),
        fix="Sum -p_sink * rowsum(dO * O) over items and queries, in float32.",
    ),
)
