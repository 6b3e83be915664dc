"""The NUM clauses: how close results are to the exact ones, in every dtype."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="NUM-1",
        level="MUST",
        title="Results are within the derived bound",
        statement=(
            "Output and weights match the oracle's within the error bound, in every claimed dtype"
            " (float64, float32, bfloat16, float16)."
        ),
        why=(
            "An error larger than rounding is a bug that no loss curve shows: training compensates"
            " for it, and the weights then fit this implementation alone."
        ),
        source="Higham 2002, chapter 3 (gamma_n bounds for sums and inner products)",
        differs=(
            "Fused kernels accumulate half precision in float32 and round once; plain code rounds"
            " scores and weights to the dtype in between. The bound depends on the declared"
            " rounding profile."
        ),
        violation=(
            "`scores * 0.35` for 1/sqrt(8) = 0.35355: scores of ordinary size are 1% too small,"
            " which in float32 is far more than rounding."
        ),
        fix=(
            "Compare with the formula step by step: scale, mask, softmax axis, split of the heads,"
            " biases, the last tile. If only rounding is left, loosen a `Claims(rounding=...)` that"
            " is stricter than the code; the default allows the most, but for float8"
            ' (`Rounding(heads_stored="float8_e4m3fn")`).'
        ),
        general=True,
    ),
    Clause(
        id="NUM-2",
        level="MUST",
        title="float64 really is float64",
        statement="In float64, no constant or intermediate result is rounded to float32.",
        why=(
            "Users who ask for float64 need it: for gradcheck, for reference results, for science."
            " One step in float32 leaves 7 of 16 digits, and finite differences fail."
        ),
        source=(
            "Higham 2002, chapter 3; known bug: a scale stored as float32, or a softmax forced to"
            " float32"
        ),
        differs=(
            "Several libraries compute the softmax in float32 whatever the input (MLX documents"
            " it), which leaves an error of about 3e-7 in float64; an implementation must declare"
            " that in its rounding profile. F.scaled_dot_product_attention 2.13 agrees with plain"
            " float64 code to about 1e-15 on the CPU."
        ),
        violation=(
            "`torch.tensor(d_k).float().rsqrt()` as the scale: with d_k = 8, every score of a"
            " float64 call has a relative error of 1.7e-8."
        ),
        fix=(
            "Compute constants in Python floats, make tensors with `dtype=query.dtype`, and remove"
            " `.float()` from the float64 path; or declare `Rounding(softmax_in_float32=True)` if"
            " only the softmax is in float32."
        ),
    ),
    Clause(
        id="NUM-3",
        level="SHOULD",
        title="Half-precision error is at most twice the plain formula's",
        statement=(
            "In bfloat16 and float16, the root mean square error over the output is at most twice"
            " that of the plain formula run in the same dtype."
        ),
        why=(
            "Half precision has two to three decimal digits. Avoidable roundings use them up, and"
            " accumulate from layer to layer into a model that is worse than its format."
        ),
        source=(
            "Dao et al. 2022: FlashAttention's own tests allow twice the error of a plain"
            " implementation in the same dtype"
        ),
        differs=(
            "FlashAttention applies the factor to the largest error, not to the root mean square."
        ),
        violation=(
            "`context += p @ v` in bfloat16, one key after another: each addition rounds, and over"
            " 512 keys the measured error was 6 times that of one matrix product."
        ),
        fix=(
            "Accumulate in float32 and round once, at the end: `torch.matmul` and"
            " `torch.softmax` do."
        ),
        general=True,
    ),
    Clause(
        id="NUM-4",
        level="MUST",
        title="Masking works in float16",
        statement="Masking works in float16, where a fill value of -1e9 does not fit.",
        why=(
            "A model tested in float32 is often served in float16. A fill value that does not fit"
            " raises at the first masked batch, or becomes -infinity and makes empty rows NaN."
        ),
        source=(
            "IEEE 754: the largest finite binary16 number is 65504; known bugs: NVIDIA/apex#1105, "
            "facebookresearch/fairseq#3575, google/flax#1527"
        ),
        differs=(
            "torch 2.13 raises when `masked_fill` fills a float16 tensor with -1e9, but adding -1e9"
            " or casting it silently gives -infinity. Flax fills with the dtype's lowest finite"
            " number, torch with -infinity."
        ),
        violation=(
            "`scores.masked_fill(~mask, -1e9)` on float16 scores: torch 2.13 raises, since the"
            " value cannot be converted without overflow."
        ),
        fix='Fill with `float("-inf")`, which fits every dtype, instead of a number such as -1e9.',
        general=True,
    ),
    Clause(
        id="NUM-5",
        level="MUST",
        title="Long rows stay accurate",
        statement=(
            "Long rows stay within the bound: S up to 4096 in the default profile and up to 65536"
            " in the thorough one, checked against the oracle on sampled rows."
        ),
        why=(
            "Models run on contexts longer than any test. A sum over tens of thousands of keys that"
            " loses its small terms, or an index that overflows, gives incorrect numbers without an"
            " error."
        ),
        source=(
            "Higham 2002, chapter 3: the bound grows with the length of the sum; known bug: index"
            " overflow at large sizes (pytorch/pytorch#162588)"
        ),
        differs=(
            "The memory-efficient CUDA kernel gave incorrect results with a mask beyond S = 65536,"
            " where the math backend is correct (pytorch/pytorch#162588)."
        ),
        violation=(
            "A sum of exponentials kept in bfloat16: it stalls at 256, where adding 1 rounds away,"
            " so a row of 4096 equal scores has weights of 1/256."
        ),
        fix=(
            "Keep running sums in float32, or in float64 for float64, and indices in 64 bits;"
            " process the last tile too, and join parts of a row by their maximum and their sum."
        ),
        general=True,
    ),
    Clause(
        id="NUM-6",
        level="MUST",
        title="Extreme magnitudes stay accurate",
        statement=(
            "Results stay within the bound for inputs of very large and of very small magnitude."
        ),
        why=(
            "Large models have outliers, and newly initialised or quantised ones have tiny numbers."
            " An intermediate result that overflows or underflows there turns a sound layer's"
            " output into NaN or zero."
        ),
        source=(
            "Higham 2002, chapters 2 and 3 (overflow, underflow and relative error); Milakov &"
            " Gimelshein 2018"
        ),
        differs=(
            "Where the scale is applied matters in float16: scaling the query before the product,"
            " as Keras and Flax do, overflows later than scaling the product."
        ),
        violation=(
            "`(q @ k.transpose(-1, -2)) / math.sqrt(d_k)` in float16: with d_k = 64 and entries of"
            " 40, the product is 102400, above 65504, and the row is NaN, although the scaled score"
            " is 12800."
        ),
        fix=(
            "Scale the query before the product in float16, subtract the row's maximum before"
            " `exp`, and add no epsilon."
        ),
        general=True,
    ),
    Clause(
        id="NUM-7",
        level="MUST",
        title="Half-precision errors do not add up to a defect",
        statement=(
            "In bfloat16 and float16, the error of the output, projected on what a small defect"
            " would do to it (another scale, a lost key, weights that do not sum to 1, a masked key"
            " that leaks), is no larger than independent roundings explain."
        ),
        why=(
            "Most kernels run in half precision alone, where the bound on each element leaves room"
            " for a scale that is 30% off. Roundings do not conspire over thousands of elements; a"
            " defect does, and a model trained with it fits this kernel alone."
        ),
        source=(
            "Higham and Mary 2019 (independent roundings grow as sqrt(n) u); Hoeffding 1963: a"
            " false alarm has a probability of at most 3e-14 under that model; Arm's TOSA"
            " conformance tests bound the bias of the error of a product"
        ),
        differs=(
            "FlashAttention's own tests allow twice the largest error of plain code, which a scale"
            " that is 1% off often passes in bfloat16. Where an implementation rounds,"
            " `Claims(rounding=...)` says; one that truncates instead of rounding to nearest fails,"
            ' or declares `Rounding(mode="toward_zero")` and is left out.'
        ),
        violation=(
            "`scores * 0.18` for 1/sqrt(32) = 0.17678: each bfloat16 output is within the bound,"
            " but together they are as if the scores were 1.8% too large."
        ),
        fix=(
            "The message says of which defect there is how much. Look there first: the scale and"
            " constants near it, an epsilon in the denominator, the first masked and the last"
            " allowed key, a cast that truncates."
        ),
        general=True,
    ),
    Clause(
        id="NUM-8",
        level="SHOULD",
        title="Half-precision error is as large as its roundings explain",
        statement=(
            "In bfloat16 and float16, the root mean square error of the output is no larger than"
            " independent roundings of the numbers that an implementation stores explain: sums are"
            " kept in float32. More than twice that, on 4096 keys, is a MUST."
        ),
        why=(
            "A sum that is kept in half precision loses digits with every key. No element is off by"
            " more than the worst case, and the errors have no direction, so that neither a bound"
            " nor a projection shows it."
        ),
        source=(
            "Hsu, Kakade and Zhang 2012, theorem 2.1: under that model a false alarm has a"
            " probability of about 1e-14; Arm's TOSA conformance tests bound the variance of the"
            " error of a product"
        ),
        differs=(
            "NUM-3 compares with the plain formula, which rounds in places of its own. Here the"
            " places are those that `Claims(rounding=...)` declares."
        ),
        violation=(
            "`total = total + weights[..., key]` in bfloat16, for each of 33 keys: the root mean"
            " square error is 1.2 times what all other roundings explain at most; for 600 keys, 20"
            " times."
        ),
        fix=(
            "Keep running sums, and the rescaled parts of an online softmax, in float32, and round"
            " once at the end."
        ),
        general=True,
    ),
)
