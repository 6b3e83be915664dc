"""The DRP clauses: dropout of the attention weights or of the output, where claimed."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="DRP-1",
        level="MUST",
        title="Dropout is off in eval mode",
        statement="In eval mode, and with p = 0, dropout does nothing.",
        why=(
            "Otherwise a served model gives a different answer to the same question each time, and"
            " the validation loss is both too high and noisy."
        ),
        source="Srivastava et al. 2014; torch.nn.Dropout documentation",
        differs=(
            "torch.nn.MultiheadAttention obeys its mode, but F.scaled_dot_product_attention has"
            " none: it drops whenever `dropout_p > 0`, so the caller must pass 0 in eval mode."
        ),
        violation=(
            "`F.dropout(weights, self.p)`: its argument `training` is True by default, so `eval()`"
            " does not switch dropout off."
        ),
        fix=(
            "`F.dropout(weights, self.p, self.training)`, and `dropout_p=self.p if self.training"
            " else 0.0` for `F.scaled_dot_product_attention`."
        ),
    ),
    Clause(
        id="DRP-2",
        level="MUST",
        title="Dropout keeps the output unbiased",
        statement=(
            "In training mode the output is unbiased: its mean over seeds is the output without"
            " dropout. Each weight is dropped independently of the others of its head and item,"
            " with probability p, for all columns of its value, and is otherwise scaled by 1/(1-p)."
            ' Where dropout of the output is claimed (`dropout="output"`), the same holds for each'
            " number of the output instead. The statistical test states its false-alarm rate, which"
            " is at most 1e-9. (For heads and items that share a pattern, see DRP-5.)"
        ),
        why=(
            "Without the factor 1/(1-p), activations are smaller in training than in evaluation,"
            " and later layers meet a scale that they were not trained on."
        ),
        source=(
            "Srivastava et al. 2014 (inverted dropout scales by 1/(1-p)); an exact binomial test"
        ),
        differs=(
            "Vaswani et al. 2017, section 5.4, drops sub-layer outputs and embeddings, and does not"
            " mention the weights. torch.nn.MultiheadAttention and Keras drop weights, each"
            " independently."
        ),
        violation=(
            "`weights * (torch.rand_like(weights) > p)`: with p = 0.1, the mean context in training"
            " is 0.9 times that in eval mode."
        ),
        fix=(
            "Use `F.dropout`, which divides by 1 - p, once, on the weights (B, H, L, S) after the"
            " softmax; or declare what is dropped with `Claims(dropout=...)`."
        ),
    ),
    Clause(
        id="DRP-3",
        level="MUST",
        kind="conduct",
        title="Dropout follows the seed",
        statement=(
            "The same seed gives the same result and, for 0 < p < 1, a different seed gives a"
            " different result. p = 1 SHOULD not give NaN; a constructor may refuse it."
        ),
        why=(
            "A run must be repeatable from its seed, and activation checkpointing must draw the"
            " same pattern when it recomputes. A pattern that never changes always drops the same"
            " weights."
        ),
        source=(
            "PyTorch documentation on reproducibility; known bug: a scale of 1/(1-p) divides by"
            " zero at p = 1"
        ),
        differs=(
            "torch.nn.MultiheadAttention and F.scaled_dot_product_attention 2.13 give a zero"
            " context for p = 1 on the CPU; on CUDA, F.scaled_dot_product_attention gives NaN."
        ),
        violation=(
            "`torch.rand(shape, generator=torch.Generator().manual_seed(0))` in each call: every"
            " step drops the same weights, whatever the seed of the run."
        ),
        fix=(
            "Use `F.dropout`, which draws from torch's default generator and gives zeros for p = 1;"
            " set no seed, and keep no generator."
        ),
    ),
    Clause(
        id="DRP-4",
        level="SHOULD",
        title="Weights are returned before dropout",
        statement="The returned weights are those before dropout, so their rows sum to 1.",
        why=(
            "Weights are returned for inspection, or to enter a loss. After dropout, they are zero"
            " at keys that the model attends to, and too large elsewhere."
        ),
        source=(
            "Follows from SMX-1; pytorch/pytorch#42929 and #33360 report rows that do not sum to 1"
        ),
        differs=(
            "torch.nn.MultiheadAttention returns weights after dropout (in one measurement at p ="
            " 0.5, its rows summed to between 0.90 and 1.35). Keras and Flax return those before."
            " Tutorials do either."
        ),
        violation=(
            "`weights = F.dropout(scores.softmax(-1), p, self.training)`, returned as they are:"
            " with p = 0.5, about half of them are 0 and the others are doubled."
        ),
        fix=(
            "Keep the weights before dropout for the caller: `dropped = F.dropout(weights, ...)`,"
            " and return `weights`."
        ),
    ),
    Clause(
        id="DRP-5",
        level="SHOULD",
        title="Heads and items drop independently",
        statement=(
            "In training mode no two heads, and no two items of a batch, drop the same weights."
        ),
        why=(
            "One pattern for all heads and items has the same mean and a larger variance: the"
            " gradient of a batch is as noisy as that of one item."
        ),
        source=(
            "Srivastava et al. 2014; torch.nn.Dropout documentation: each element is zeroed"
            " independently"
        ),
        differs=(
            "Flax shares one pattern across batch and heads by default (`broadcast_dropout=True`)."
        ),
        violation=(
            "`weights * F.dropout(torch.ones_like(weights[:1, :1]), p)`: each head of each item"
            " loses the same keys."
        ),
        fix=(
            "Draw for all of the weights (B, H, L, S), as `F.dropout(weights, p, self.training)`"
            " does."
        ),
    ),
)
