"""The ALB clauses: a bias that grows with the distance of a key."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="ALB-1",
        level="MAY",
        title="ALiBi equals the float mask of its slopes",
        statement=(
            "With a slope m of each head, m (t - p) is added to the score of key t for a query at"
            " place p, or -m |t - p|, as `Alibi.form` says, and the result is that of a call with"
            " this float mask. Where `Alibi(per_item=True)` is claimed, slopes may be of each item"
            " and head. A signed bias may be counted from another place where"
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
    Clause(
        id="ALB-2",
        level="MAY",
        title="Built-in slopes are the usual ones",
        statement=(
            "Slopes that are built in are 2^(-8j/n) for j = 1 to n, with n the largest power of two"
            " that is no more than H, and then the odd powers of 2^(-4/n), one for each of the H -"
            " n heads that are left."
        ),
        why=(
            "A model was trained with these. With other slopes for heads whose number is no power"
            " of two, as 40 or 112, some heads look nearer or farther than they learned to."
        ),
        source="Press et al. 2022, and their code; known bug: ml-explore/mlx#343",
        differs=(
            "FlashInfer, cuDNN, Transformer Engine and transformers agree. MLX took 2^(-8j/H) for"
            " every H until 2026."
        ),
        violation="`2 ** (-8 * (j + 1) / H)` for H = 12: only a power of two gives the usual ones.",
        fix=(
            "Make those of n = 2^floor(log2 H) heads first, and of every second one of 2n heads as"
            " many as are missing."
        ),
    ),
)
