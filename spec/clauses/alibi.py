"""The ALB clause: a bias that grows with the distance of a key."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="ALB-1",
        level="MAY",
        title="ALiBi equals the float mask of its slopes",
        statement=(
            "With a slope m of each head, m (t - p) is added to the score of key t for a query at"
            " place p, or -m |t - p|, as `Alibi.form` says, and the result is that of a call with"
            " this float mask. A signed bias may be counted from another place where"
            ' `Alibi(origin="any")` is claimed, which changes no weight.'
        ),
        why=(
            "BLOOM and MPT have no other positions. With the sign turned round, or slopes of other"
            " heads, a model reads its text from the wrong end, without an error."
        ),
        source="Press et al. 2022, section 3; known bug: meta-pytorch/attention-gym#86",
        differs=(
            "flash-attention adds -m |t - p| aligned bottom-right, and m t beside its causal flag."
            " FlashInfer, cuDNN and vLLM add m (t - p), the first two with slopes of their own."
        ),
        violation="`slopes * (query_places - key_places)`: far keys count most.",
        fix="Add slope * (t - p), which is 0 for the query's own key and negative before it.",
    ),
)
