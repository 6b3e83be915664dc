"""The CFG clauses: which configurations are refused, and which must be accepted."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CFG-1",
        level="MUST",
        title="Indivisible head counts are refused",
        statement="Construction with d_model % n_heads != 0 is refused with an exception, before any forward pass.",
        source="Vaswani et al. 2017, section 3.2.2 (d_k = d_model / h); torch.nn.MultiheadAttention documentation",
        differs=(
            "Keras takes the head width (`key_dim`) instead of dividing `d_model`, so there every head count is "
            "valid. Code that computes `d_model // n_heads` without a check builds a module that fails later, in a "
            "reshape."
        ),
    ),
    Clause(
        id="CFG-2",
        level="SHOULD",
        title="The refusal is a ValueError naming both numbers",
        statement=(
            "The exception of CFG-1 is a ValueError whose message contains both d_model and n_heads. An `assert` does "
            "not serve: it vanishes under `python -O`."
        ),
        source=(
            "Python documentation of the assert statement; pytorch/pytorch#28719 asks for the numbers in the message"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 raises AssertionError (explicitly, so `python -O` keeps it), and the "
            "message names neither number."
        ),
    ),
    Clause(
        id="CFG-3",
        level="MUST",
        title="Non-positive sizes are refused",
        statement="A d_model or n_heads that is not positive is refused at construction.",
        source="Defect class: sizes that are not validated (pytorch/pytorch#105630)",
        differs=(
            "torch.nn.MultiheadAttention 2.13 raises ValueError and names both numbers; older versions failed inside "
            "the initialisation with a division by zero."
        ),
    ),
    Clause(
        id="CFG-4",
        level="MUST",
        title="Every divisor of d_model is accepted",
        statement=(
            "Every n_heads that divides d_model is accepted, n_heads = 1 and n_heads = d_model (d_k = 1) included."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.2: the equations hold for any h that divides d_model; table 3 (A) "
            "varies h from 1 to 32"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 takes its inference fast path only for an even number of heads, so the "
            "parity of `num_heads` decides which code runs."
        ),
    ),
    Clause(
        id="CFG-5",
        level="MUST",
        title="bias=False means no bias at all",
        statement=(
            "With bias=False there is no bias parameter, and the result equals that of the same weights with all "
            "biases zero."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation, argument `bias`; the projections of Vaswani et al. 2017, "
            "section 3.2.2, have no bias"
        ),
        differs=(
            "torch.nn.MultiheadAttention, Keras and Flax initialise the biases to zero, so a freshly built module "
            "cannot show that one of them is dropped or misplaced."
        ),
    ),
    Clause(
        id="CFG-6",
        level="SHOULD",
        title="Impossible dropout probabilities are refused",
        statement="A dropout outside [0, 1], NaN included, is refused at construction.",
        source=(
            "torch.nn.Dropout documentation: the probability lies between 0 and 1; defect class: a range check "
            "written so that NaN passes it"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 accepts any number at construction: 1.5 fails at the first call in "
            "training mode, while -0.1 and NaN fail only with `need_weights=False` and otherwise silently mean no "
            "dropout. torch.nn.Dropout refuses 1.5 and -0.1 at construction, but accepts NaN."
        ),
    ),
)
