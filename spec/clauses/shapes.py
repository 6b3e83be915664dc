"""The SHP clauses: shapes, dtype, device and memory layout of inputs and results."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SHP-1",
        level="MUST",
        title="The output has the query's shape",
        statement=(
            "`output` is (B, L, D) for a query of (B, L, D) and a key and value of (B, S, D). L != S is allowed where "
            "cross-attention is claimed."
        ),
        why=(
            "The residual sum adds the output to the query. Another order of dimensions fails there or, where two "
            "sizes happen to be equal, adds unrelated positions without an error."
        ),
        source="Vaswani et al. 2017, sections 3.2.2 and 3.2.3; torch.nn.MultiheadAttention documentation",
        differs=(
            "torch.nn.MultiheadAttention has the sequence first unless `batch_first=True`, and also takes inputs "
            "without a batch dimension. Without it, a (B, L, D) tensor is accepted and attention runs over the batch: "
            "no shape shows it."
        ),
        violation=(
            "`return output.transpose(0, 1)`, for sequence-first callers: the shape is (L, B, D), which fits the query "
            "when B = L."
        ),
    ),
    Clause(
        id="SHP-2",
        level="MUST",
        title="Returned weights are per head",
        statement="`weights`, where claimed, have the shape (B, H, L, S): one matrix for each head.",
        why=(
            "Analysis, pruning and distillation look at single heads. A caller can average over the heads, but cannot "
            "undo an average."
        ),
        source="Vaswani et al. 2017, section 3.2.2: each head has its own softmax",
        differs=(
            "torch.nn.MultiheadAttention averages them over the heads unless `average_attn_weights=False`. The fused "
            "kernels (F.scaled_dot_product_attention, MLX) return none, and flex_attention returns the logsumexp "
            "only."
        ),
        violation=(
            "`return output, weights.mean(1)`: the shape is (B, L, S), and two heads that look at one key each appear "
            "as one that looks at both."
        ),
    ),
    Clause(
        id="SHP-3",
        level="MUST",
        title="Output keeps the inputs' dtype and device",
        statement="The output's dtype and device are those of the inputs (autocast aside).",
        why=(
            "A float32 result in a bfloat16 model raises in the next `nn.Linear`, or promotes the residual sum, so "
            "that all that follows takes twice the memory."
        ),
        source=(
            "torch.nn.Linear and F.scaled_dot_product_attention documentation; defect class: a softmax in float32 "
            "whose result is not cast back"
        ),
        differs=(
            "torch.nn.MultiheadAttention refuses inputs whose dtype is not that of its weights; Flax promotes inputs "
            "and parameters to a common dtype."
        ),
        violation=(
            "`F.linear(context.float(), w_o.float(), b_o.float())`, for accuracy, without a cast back: a float16 query "
            "gives a float32 output."
        ),
    ),
    Clause(
        id="SHP-4",
        level="MUST",
        title="Sizes of one keep their dimension",
        statement="B = 1, L = 1 and S = 1 work, in every combination, and no dimension is squeezed away.",
        why=(
            "One query is a step of decoding, one item a request, one key the first token. Training batches seldom "
            "have any of these, so a dimension that vanishes there fails in production."
        ),
        source="Defect class: `squeeze()` without a dimension, and special cases for one query or one item",
        differs="",
        violation=(
            "`context.squeeze()` before W_o: a batch of one gives an output of shape (L, D), where (1, L, D) is due."
        ),
    ),
    Clause(
        id="SHP-5",
        level="SHOULD",
        title="Empty inputs give empty outputs",
        statement=(
            "B = 0 and L = 0 give an empty output of the right shape. S = 0 gives a result according to the empty-row "
            "policy of MSK-8."
        ),
        why=(
            "A batch is empty after filtering, or on one rank of several; a memory is empty before its first entry. An "
            "exception ends a job that had nothing to compute."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: no query means no row, and no key means a row without "
            "allowed keys"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 accepts all three, and gives exactly `b_o` for S = 0, although with "
            "`need_weights=True` a row whose keys are all masked gives NaN."
        ),
        violation="`scores - scores.amax(-1, keepdim=True)`: with S = 0 there is no maximum, and `amax` raises.",
    ),
    Clause(
        id="SHP-6",
        level="MUST",
        title="Sizes that disagree raise",
        statement=(
            "A query, key or value whose last dimension is not D, a key and value whose S differ, and batch sizes "
            "that disagree raise an exception. None is ever broadcast silently."
        ),
        why=(
            "A batch of one where several were meant is a mistake in collating. Broadcast, it lets every item attend "
            "to the same keys, and training goes on with a wrong loss."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (shapes of the inputs); defect class: silent broadcasting of a "
            "batch of one"
        ),
        differs=(
            "F.scaled_dot_product_attention broadcasts a key of batch size 1. Its CPU flash kernel (torch 2.13) "
            "accepts a value longer than the key and reads past the end of the key (pytorch/pytorch#193728); the math "
            "backend raises."
        ),
        violation=(
            "`q @ k.transpose(-1, -2)` without a check of sizes: a key and value of batch size 1 serve every item of "
            "the query."
        ),
    ),
    Clause(
        id="SHP-7",
        level="MUST",
        title="Memory layout does not change the result",
        statement=(
            "Non-contiguous, transposed, expanded (stride 0) and sliced (storage offset) inputs give the same result "
            "as their contiguous copies."
        ),
        why=(
            "Slices of a longer buffer, transposed sequences and expanded prefixes are how models save memory. Code "
            "that reads them as dense takes numbers from other positions, and nothing raises."
        ),
        source=(
            "torch.Tensor.contiguous documentation: layout is not part of a tensor's value; defect class: kernels "
            "that read strided memory as dense (pytorch/pytorch#112577, #187506)"
        ),
        differs=(
            "The memory-efficient CUDA kernel returned garbage for non-contiguous inputs in torch 2.1, and a later "
            "fix concerns CPU flash attention with a strided innermost dimension. torch.nn.MultiheadAttention gave "
            "equal bits for transposed and sliced inputs (2.13, CPU)."
        ),
        violation=(
            "A kernel that is given `query.data_ptr()` and the sizes, but not the strides: from `x.transpose(0, 1)` it "
            "reads the rows of other items."
        ),
    ),
)
