"""The SHP clauses: shapes, dtype, device and memory layout of inputs and results."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="SHP-1",
        level="MUST",
        title="The output has the query's shape",
        statement=(
            "`output` is (B, L, D) for a query of shape (B, L, D) and a key and value of shape (B,"
            " S, D). L != S is allowed where cross-attention is claimed."
        ),
        why=(
            "The residual connection adds the output to the query. If the dimensions are in another"
            " order, the sum fails or, where two sizes happen to be equal, silently adds unrelated"
            " positions."
        ),
        source=(
            "Vaswani et al. 2017, sections 3.2.2 and 3.2.3; torch.nn.MultiheadAttention"
            " documentation"
        ),
        differs=(
            "torch.nn.MultiheadAttention puts the sequence first unless `batch_first=True`, and"
            " also takes unbatched inputs. Without `batch_first`, it accepts a (B, L, D) tensor and"
            " attends over the batch; the shapes do not show it."
        ),
        violation=(
            "`return output.transpose(0, 1)`, for sequence-first callers: the shape is (L, B, D),"
            " which matches the query when B = L."
        ),
        fix=(
            "Undo each transpose and reshape before returning, so that the output is (B, L, D) like"
            " the query; take L from the query and S from the key."
        ),
    ),
    Clause(
        id="SHP-2",
        level="MUST",
        title="Returned weights are per head",
        statement="`weights`, where claimed, have shape (B, H, L, S): one matrix per head.",
        why=(
            "Analysis, pruning and distillation look at single heads. A caller can average over the"
            " heads, but cannot undo an average."
        ),
        source="Vaswani et al. 2017, section 3.2.2: each head has its own softmax",
        differs=(
            "torch.nn.MultiheadAttention averages the weights over the heads unless"
            " `average_attn_weights=False`. The fused kernels (F.scaled_dot_product_attention, MLX)"
            " return none, and flex_attention returns only the logsumexp."
        ),
        violation=(
            "`return output, weights.mean(1)`: the shape is (B, L, S), and two heads that attend to"
            " one key each look like one head that attends to both."
        ),
        fix=(
            "Return the weights (B, H, L, S) as the softmax gives them, and leave an average over"
            " the heads to the caller."
        ),
    ),
    Clause(
        id="SHP-3",
        level="MUST",
        title="Output keeps the inputs' dtype and device",
        statement=(
            "The output has the dtype and device of the inputs (except under autocast). Returned"
            " weights have them too, but may be in float32 beside an output in half precision."
        ),
        why=(
            "A float32 result in a bfloat16 model raises in the next `nn.Linear`, or promotes the"
            " residual sum, so that everything after it takes twice the memory."
        ),
        source=(
            "torch.nn.Linear and F.scaled_dot_product_attention documentation; known bug: a softmax"
            " in float32 whose result is not cast back"
        ),
        differs=(
            "torch.nn.MultiheadAttention raises for inputs whose dtype differs from that of its"
            " weights; Flax promotes inputs and parameters to a common dtype."
        ),
        violation=(
            "`F.linear(context.float(), w_o.float(), b_o.float())`, for accuracy, without casting"
            " back: a float16 query gives a float32 output."
        ),
        fix=(
            "Cast the result back with `.to(query.dtype)`, and create tensors with the dtype and"
            " device of the query."
        ),
    ),
    Clause(
        id="SHP-4",
        level="MUST",
        title="Dimensions of size one are kept",
        statement=(
            "B = 1, L = 1 and S = 1 work, in every combination, and no dimension is squeezed away."
        ),
        why=(
            "One query is a decoding step, one item a single request, one key the first token."
            " Training batches rarely have any of these, so a dimension that vanishes there fails"
            " in production."
        ),
        source=(
            "Known bugs: `squeeze()` without a dimension, and special cases for one query or one"
            " item"
        ),
        differs="",
        violation=(
            "`context.squeeze()` before W_o: a batch of one gives an output of shape (L, D) instead"
            " of (1, L, D)."
        ),
        fix=(
            "Name the dimension in `squeeze(dim)`, or use `flatten` and `unflatten`, and remove the"
            " special case for size 1."
        ),
    ),
    Clause(
        id="SHP-5",
        level="SHOULD",
        title="Empty inputs give empty outputs",
        statement=(
            "B = 0 and L = 0 give an empty output of the correct shape. S = 0 gives a context of"
            " zeros where the empty-row policy of MSK-8 is `zeros`, and of zeros or NaN where it is"
            " `nan`; other policies leave it open."
        ),
        why=(
            "A batch can be empty after filtering, or on one of several ranks; a memory is empty"
            " before its first entry. An exception ends a job that had nothing to compute."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: no query means no row, and a context"
            " is a sum over the keys, so that of no key is zero"
        ),
        differs=(
            "torch.nn.MultiheadAttention 2.13 accepts all three. For S = 0 it gives exactly b_o,"
            " although a row whose keys are all masked gives NaN with `need_weights=True`."
        ),
        violation=(
            "`scores - scores.amax(-1, keepdim=True)`: with S = 0 there is no maximum, and `amax`"
            " raises."
        ),
        fix=(
            "Let empty tensors take the same path: name sizes instead of -1 in `view`, and treat S"
            " = 0 as rows without an allowed key before an operation that needs an element, such as"
            " `amax`."
        ),
    ),
    Clause(
        id="SHP-6",
        level="SHOULD",
        kind="refusals",
        title="Mismatched widths and lengths raise",
        statement=(
            "A query, key or value whose last dimension is not D, and a key and value with"
            " different S, raise an exception. Neither is ever broadcast silently. (For batch"
            " sizes, see SHP-8.)"
        ),
        why=(
            "A length that differs is a bug of the caller. If a value of length 1 is broadcast, or"
            " a longer one is read in part, training goes on with an incorrect loss."
        ),
        source=(
            "torch.nn.MultiheadAttention documentation (shapes of the inputs);"
            " pytorch/pytorch#193728"
        ),
        differs=(
            "The CPU flash kernel of F.scaled_dot_product_attention (torch 2.13) accepts a value"
            " longer than the key and reads past the end of the key (pytorch/pytorch#193728); the"
            " math backend raises."
        ),
        violation=(
            "A kernel that takes S from the value alone: with a shorter key, it reads numbers that"
            " belong to no key."
        ),
        fix=(
            "Compare the sizes of query, key and value at the top of `forward`, and raise a"
            " ValueError that names them."
        ),
        accepts="inputs whose widths or lengths do not match",
    ),
    Clause(
        id="SHP-7",
        level="MUST",
        title="Memory layout does not change the result",
        statement=(
            "Non-contiguous, transposed, expanded (stride 0) and sliced (storage offset) inputs"
            " give the same result as their contiguous copies, or an exception. They SHOULD be"
            " accepted."
        ),
        why=(
            "Models save memory with slices of a longer buffer, transposed sequences and expanded"
            " prefixes. Code that assumes dense inputs silently reads numbers from other positions."
        ),
        source=(
            "torch.Tensor.contiguous documentation: layout is not part of a tensor's value; known"
            " bug: kernels that read strided memory as dense (pytorch/pytorch#112577, #187506)"
        ),
        differs=(
            "The memory-efficient CUDA kernel returned garbage for non-contiguous inputs in torch"
            " 2.1, and a later fix concerns CPU flash attention with a strided innermost dimension."
            " torch.nn.MultiheadAttention 2.13 (CPU) gave the same bits for transposed and sliced"
            " inputs."
        ),
        violation=(
            "A kernel that takes `query.data_ptr()` and the sizes, but not the strides: for"
            " `x.transpose(0, 1)`, it reads the rows of other items."
        ),
        fix=(
            "Use `reshape` instead of `view`, and pass a kernel the strides, or what"
            " `.contiguous()` returns. A kernel that is meant for contiguous heads alone is"
            " declared with `from_kernel(contiguous=True)`."
        ),
    ),
    Clause(
        id="SHP-8",
        level="SHOULD",
        kind="refusals",
        title="A batch of one is not broadcast",
        statement=(
            "A query, key and value whose batch sizes differ raise an exception, also where one of"
            " them is 1: it is not broadcast."
        ),
        why=(
            "A batch of one where several items were meant is a collation bug. If it is broadcast,"
            " every item attends to the same keys, and training goes on with an incorrect loss."
        ),
        source="torch.nn.MultiheadAttention documentation (shapes of the inputs)",
        differs=(
            "torch.nn.MultiheadAttention raises. F.scaled_dot_product_attention, and every module"
            " that multiplies with `@` or `torch.matmul`, broadcasts a key and value of batch size"
            " 1, which some callers rely on."
        ),
        violation=(
            "`q @ k.transpose(-1, -2)` without a size check: all items of the query share a key and"
            " value of batch size 1."
        ),
        fix=(
            "`if not len(query) == len(key) == len(value): raise ValueError(...)`, or document that"
            " a batch of one is broadcast and ignore the clause."
        ),
        accepts="batches of one beside larger ones",
    ),
    Clause(
        id="SHP-9",
        level="SHOULD",
        kind="conduct",
        title="A module can be moved to another dtype",
        statement=(
            "`.to(dtype)` after the construction moves everything: calls with inputs of the new"
            " dtype, where it is claimed, return it, within the bound."
        ),
        why=(
            "Models are loaded in float32 and run in half precision, or checked in float64. A"
            " table, or a scale, that stays behind raises an error about dtypes, or leaves results"
            " as inexact as they were."
        ),
        source="torch.nn.Module.to documentation: it moves parameters and buffers",
        differs="torch.nn.MultiheadAttention can be moved.",
        violation=(
            "`self.scale = torch.tensor(d_k ** -0.5)`, a plain attribute, in `__init__`: it stays"
            " float32 in a module that is moved to float64."
        ),
        fix=(
            "Register tensors with `register_buffer`, keep numbers as Python floats, or make"
            " tensors in the call."
        ),
    ),
)
