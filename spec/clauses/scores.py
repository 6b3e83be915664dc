"""The SCL clause: an explicit scale."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SCL-1",
        level="MAY",
        title="An explicit scale is the scale",
        statement=(
            "Where a call may give a scale, the scores are multiplied by it and by nothing else,"
            " and one that is equal to the default changes nothing. Zero and negative ones count"
            ' where `Scores(scale="any")` is claimed.'
        ),
        why=(
            "Models with another scale, such as those of T5, Gemma or muP, pass it. A kernel that"
            " ignores it, or multiplies by 1/sqrt(d_k) as well, runs them with a softmax that is"
            " too sharp or too flat."
        ),
        source=(
            "F.scaled_dot_product_attention documentation (`scale`); known bug:"
            " Dao-AILab/flash-attention#1186"
        ),
        differs=(
            "F.scaled_dot_product_attention and flash-attention take the factor; vLLM's and"
            " SGLang's kernels have no default for it. A scale of 0 is read as none where code asks"
            " `scale or 1 / sqrt(d_k)`."
        ),
        violation="`scale = scale or d_k**-0.5`: a scale of 0 gives the usual one.",
        fix="Ask `if scale is None`, and multiply the scores once, by the scale or by 1/sqrt(d_k).",
    ),
)
