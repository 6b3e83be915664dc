"""The WIN clauses: which keys a window lets a query see."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="WIN-1",
        level="MAY",
        title="A window has exactly its keys",
        statement=(
            "With a window of `left` keys before and `right` keys after its own place, a query at"
            " place p sees the keys t with p - left <= t <= p + right, and of these those that mask"
            " and causal flag allow. The place of query i is i, or i + S - L, as claimed"
            " (`Claims.causal`, `Scores.alignment`). `Window.form` says how an argument counts:"
            " with or without the query's own key."
        ),
        why=(
            "Mistral, Gemma and gpt-oss attend in windows. One that has a key too many or too few"
            " is no crash: each layer reads something else than in training, and long texts get"
            " slowly worse."
        ),
        source="Beltagy et al. 2020 (Longformer); flash-attention README (`window_size`)",
        differs=(
            "flash-attention's (left, right) are both inclusive, transformers' `sliding_window`"
            " counts the query's own key, SGLang's `sliding_window_size` does not, and cuDNN's left"
            " bound does while its right one does not. JAX aligns a window top-left,"
            " flash-attention bottom-right."
        ),
        violation=(
            "`(t > p - left)` where `(t >= p - left)` is meant: the last key of each window is"
            " lost."
        ),
        fix=(
            "Compare the distance t - p with -left and right, both inclusive, and translate the"
            " argument only once."
        ),
    ),
    Clause(
        id="WIN-2",
        level="MAY",
        title="A window of everything equals none",
        statement=(
            "A window that covers all keys gives the result of a call without one, and so does one"
            " that is unbounded. A query whose window has only masked keys has an empty row, see"
            " MSK-8."
        ),
        why=(
            "Models set the window to the longest context to switch it off. Rows of padding beyond"
            " their window give NaN, or attend to everything, if a kernel skips their tiles."
        ),
        source="flash-attention README; known bug: Dao-AILab/flash-attention#895",
        differs=(
            "-1 stands for unbounded in flash-attention 2, None in flash-attention 4, where -1 is"
            " an offset. flash-attention 2 reads a right bound of S or more as unbounded, and so is"
            " wrong for L > S."
        ),
        violation=(
            "`right = S if right < 0 else right`: with more queries than keys, the last ones lose"
            " keys."
        ),
        fix=(
            "Leave out the comparison of a side that is unbounded, instead of using a large number."
        ),
    ),
)
