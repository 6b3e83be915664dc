"""The CFG clauses: which configurations are rejected, and which must be accepted."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CFG-1",
        level="MUST",
        kind="refusals",
        title="Indivisible head counts give no result",
        statement=(
            "No call returns a result where `d_model % n_heads != 0`: construction raises an"
            " exception, or else each call does. The clause does not apply where heads may have a"
            " width of their own (`Claims.own_head_dim`), or where the constructor takes that"
            " width."
        ),
        why=(
            "Such sizes are usually a typo in a configuration. If they are accepted, the model that"
            " is trained has another number of heads than its configuration says, or leaves some of"
            " its columns unused."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.2 (d_k = d_model / h); torch.nn.MultiheadAttention"
            " documentation"
        ),
        differs=(
            "Keras takes the head width (`key_dim`) instead of dividing `d_model`, so every head"
            " count is valid there. Code that computes `d_model // n_heads` without a check fails"
            " in the first call, in a reshape, or builds another number of heads."
        ),
        violation=(
            "`head_dim = d_model // n_heads` without a check, and `view(B, L, -1, head_dim)`:"
            " `d_model=3, n_heads=2` computes three heads of width 1."
        ),
        fix="`if d_model % n_heads: raise ValueError(...)` first thing in the constructor.",
        accepts="a `d_model` that `n_heads` does not divide",
    ),
    Clause(
        id="CFG-2",
        level="SHOULD",
        kind="refusals",
        title="Construction raises a ValueError naming both numbers",
        statement=(
            "Where `d_model % n_heads != 0`, construction raises a ValueError whose message"
            " contains both `d_model` and `n_heads`, before any call. An `assert` does not count:"
            " `python -O` removes it."
        ),
        why=(
            "Caught at construction, such sizes cost a second; later, the job fails in a reshape"
            " once data and machines are ready. Whoever reads the message needs both numbers to see"
            " which one to change, and a search over sizes can catch a ValueError without hiding"
            " other errors."
        ),
        source=(
            "Python documentation of the assert statement; pytorch/pytorch#28719 asks for the"
            " numbers in the message"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 raises AssertionError (with an explicit `raise`, so"
            " it survives `python -O`), and the message contains neither number."
        ),
        violation=(
            "`assert d_model % n_heads == 0`: the user gets a bare AssertionError without the"
            " numbers and, under `python -O`, no error at all."
        ),
        fix=(
            '`raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}")` instead'
            " of an `assert`."
        ),
        accepts="a `d_model` that `n_heads` does not divide, at construction",
    ),
    Clause(
        id="CFG-3",
        level="SHOULD",
        kind="refusals",
        title="Non-positive sizes are rejected",
        statement=(
            "A `d_model` or `n_heads` that is not positive raises an exception at construction."
        ),
        why=(
            "Such a size comes from a computed configuration: a width divided once too often, or a"
            " -1 that stood for a default. If it is accepted, it fails far from the faulty line, or"
            " builds a layer without weights."
        ),
        source="Known bug: sizes that are not validated (pytorch/pytorch#105630)",
        differs=(
            "torch.nn.MultiheadAttention 2.13 raises ValueError and names both numbers; older"
            " versions failed during initialisation with a division by zero."
        ),
        violation=(
            "A check of `d_model % n_heads == 0` alone: `8 % -2` is 0 too, so `n_heads=-2` is"
            " accepted."
        ),
        fix=(
            "Check `d_model > 0 and n_heads > 0` in the constructor, before the check of"
            " divisibility."
        ),
        accepts="sizes of zero or less",
    ),
    Clause(
        id="CFG-4",
        level="MUST",
        title="Every divisor of d_model is right or refused",
        statement=(
            "For every `n_heads` that divides `d_model`, including `n_heads = 1` and `n_heads ="
            " d_model` (d_k = 1), results are those of the loop over heads, or construction raises."
            " It SHOULD accept each of them."
        ),
        why=(
            "Small experiments, ablations over the number of heads, and pruned models need a single"
            " head, or heads of width 1. Code that assumes more either rejects these sizes or"
            " computes incorrect results for them alone."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.2: the equations hold for any h that divides d_model;"
            " table 3 (A) varies h from 1 to 32"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 takes its inference fast path only for an even number"
            " of heads, so the parity of `num_heads` decides which code runs."
        ),
        violation=(
            "`if d_model // n_heads not in (32, 64, 128): raise ValueError`, to suit a kernel: a"
            " model of width 8 with two heads cannot be built."
        ),
        fix=(
            "Remove the restriction on `n_heads` or d_k, or take the general code path for the"
            " sizes that a kernel does not have."
        ),
        general=True,
    ),
    Clause(
        id="CFG-5",
        level="MUST",
        title="bias=False means no bias at all",
        statement=(
            "With `bias=False` there is no bias parameter, and the result equals that of the same"
            " weights with all biases set to zero."
        ),
        why=(
            "Checkpoints of models trained without biases contain none. With a leftover bias, a"
            " strict load fails; a non-strict load leaves the bias at its initial value, and it is"
            " added to every output."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation, argument `bias`; the projections of Vaswani"
            " et al. 2017, section 3.2.2, have no bias"
        ),
        differs=(
            "torch.nn.MultiheadAttention, Keras and Flax initialise the biases to zero, so a newly"
            " built module cannot show that one of them is dropped or misplaced."
        ),
        violation=(
            "`nn.Linear(d_model, d_model)` for W_o, where the other three projections get"
            " `bias=bias`: with `bias=False`, every output is shifted by a random b_o."
        ),
        fix=(
            "Pass `bias=bias` to every projection, the output projection included, and use no bias"
            " that is not a parameter."
        ),
    ),
    Clause(
        id="CFG-6",
        level="SHOULD",
        kind="refusals",
        title="Invalid dropout probabilities are rejected",
        statement=(
            "A `dropout` below 0 or above 1 raises an exception at construction. NaN may be"
            " accepted, as by torch.nn.Dropout."
        ),
        why=(
            "Such a value is a unit error (10 for 10 per cent) or a mistake in a sweep. If it is"
            " accepted, training fails at best; at worst, the model trains without the dropout that"
            " its configuration records."
        ),
        source=(
            "torch.nn.Dropout, which raises ValueError for a probability that is not between 0"
            " and 1"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 accepts any number at construction. 1.5 fails at the"
            " first call in training mode; -0.1 fails only with `need_weights=False`, and otherwise"
            " silently means no dropout."
        ),
        violation=(
            "`self.p = p` without a check, and `if self.training and 0 < self.p < 1` in the call:"
            " with `dropout=10`, meant as 10 per cent, nothing is ever dropped."
        ),
        fix=(
            "Check `0.0 <= dropout <= 1.0` in the constructor, or keep an `nn.Dropout(dropout)`,"
            " which does."
        ),
        accepts="dropout that is not a probability",
    ),
    Clause(
        id="CFG-7",
        level="SHOULD",
        kind="conduct",
        title="Construction on any device, in any dtype",
        statement=(
            'Constructed under `torch.device("meta")`, a module gives the same results after'
            " `to_empty` and `load_state_dict`. A `dtype` and a `device` that its constructor takes"
            " are those of all its parameters."
        ),
        why=(
            "Large models are constructed without memory, and filled from a checkpoint. Tensors"
            " that are no parameters and are not saved have no values afterwards, and those of"
            " another device or dtype fail at the first call."
        ),
        source="torch documentation, 'Meta device' and 'Skipping Module Parameter Initialization'",
        differs=(
            "transformers computes such buffers once more after loading;"
            " torch.nn.MultiheadAttention has none, and passes `device` and `dtype` on to all"
            " parameters."
        ),
        violation=(
            "`self.scale = torch.tensor(head_dim ** -0.5)`: the scale stays on the meta device, and"
            " the first call after loading raises."
        ),
        fix=(
            "Keep numbers as Python numbers, tensors as saved buffers, or compute them in the call;"
            " pass `dtype` and `device` to every layer and parameter."
        ),
    ),
)
