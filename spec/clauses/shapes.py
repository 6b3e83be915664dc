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
        source="Vaswani et al. 2017, sections 3.2.2 and 3.2.3; torch.nn.MultiheadAttention documentation",
        differs=(
            "torch.nn.MultiheadAttention has the sequence first unless `batch_first=True`, and also takes inputs "
            "without a batch dimension. Without it, a (B, L, D) tensor is accepted and attention runs over the batch: "
            "no shape shows it."
        ),
    ),
    Clause(
        id="SHP-2",
        level="MUST",
        title="Returned weights are per head",
        statement="`weights`, where claimed, have the shape (B, H, L, S): one matrix for each head.",
        source="Vaswani et al. 2017, section 3.2.2: each head has its own softmax",
        differs=(
            "torch.nn.MultiheadAttention averages them over the heads unless `average_attn_weights=False`. The fused "
            "kernels (F.scaled_dot_product_attention, MLX) return none, and flex_attention returns the logsumexp "
            "only."
        ),
    ),
    Clause(
        id="SHP-3",
        level="MUST",
        title="Output keeps the inputs' dtype and device",
        statement="The output's dtype and device are those of the inputs (autocast aside).",
        source=(
            "torch.nn.Linear and F.scaled_dot_product_attention documentation; defect class: a softmax in float32 "
            "whose result is not cast back"
        ),
        differs=(
            "torch.nn.MultiheadAttention refuses inputs whose dtype is not that of its weights; Flax promotes inputs "
            "and parameters to a common dtype."
        ),
    ),
    Clause(
        id="SHP-4",
        level="MUST",
        title="Sizes of one keep their dimension",
        statement="B = 1, L = 1 and S = 1 work, in every combination, and no dimension is squeezed away.",
        source="Defect class: `squeeze()` without a dimension, and special cases for one query or one item",
        differs="",
    ),
    Clause(
        id="SHP-5",
        level="SHOULD",
        title="Empty inputs give empty outputs",
        statement=(
            "B = 0 and L = 0 give an empty output of the right shape. S = 0 gives a result according to the empty-row "
            "policy of MSK-8."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: no query means no row, and no key means a row without "
            "allowed keys"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 accepts all three, and gives exactly `b_o` for S = 0, although with "
            "`need_weights=True` a row whose keys are all masked gives NaN."
        ),
    ),
    Clause(
        id="SHP-6",
        level="MUST",
        title="Sizes that disagree raise",
        statement=(
            "A query, key or value whose last dimension is not D, a key and value whose S differ, and batch sizes "
            "that disagree raise an exception. None is ever broadcast silently."
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
    ),
    Clause(
        id="SHP-7",
        level="MUST",
        title="Memory layout does not change the result",
        statement=(
            "Non-contiguous, transposed, expanded (stride 0) and sliced (storage offset) inputs give the same result "
            "as their contiguous copies."
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
    ),
)
