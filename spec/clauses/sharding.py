"""The DST clause: attention sharded over processes."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="DST-1",
        level="MAY",
        title="Sharded attention equals unsharded",
        statement=(
            "Sharded over ranks (by heads or by sequence), the gathered result and gradients match the single-process "
            "ones within the bound."
        ),
        why=(
            "Models too large for one device are trained sharded, and checked on one device. A difference between the "
            "two does not show on any single rank."
        ),
        source="Shoeybi et al. 2019 (heads over ranks); Liu et al. 2023, Ring Attention (sequence over ranks)",
        differs="Sharding W_o by heads adds partial sums across ranks: b_o must be added once, not once per rank.",
        violation=(
            "Each rank adds b_o to its partial output before the sum over ranks: with 4 ranks, the result is 3 b_o too "
            "large."
        ),
        fix="Add b_o on one rank only, and rescale the partial results by the maximum and the sum over all ranks.",
        deferred="A test needs several processes, and no implementation claims it.",
    ),
)
