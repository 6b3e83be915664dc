"""The EFF clause: what a call says has its effect."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="EFF-1",
        level="MAY",
        title="What a call says has its effect",
        statement=(
            "An option that is claimed (an explicit scale, a window, chunks, a softcap, sinks,"
            " slopes) changes the result as far as the exact result changes. It is judged where"
            " that is more than ten times the bound."
        ),
        why=(
            "An argument that is taken and dropped runs the model of someone else, without an"
            " error."
        ),
        source=(
            "known bug: transformers' SDPA function takes `sliding_window` and `s_aux`, and ignores"
            " both"
        ),
        differs="Kernels that do not support an option raise, warn or ignore it.",
        violation="`def attend(q, k, v, **kwargs)`, with the window in `kwargs`.",
        fix="Pass the option on, or refuse it.",
    ),
)
