"""The CMP, INC, GQA, XAT and DST clauses: composition and variants, each a capability to claim."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CMP-1",
        level="MAY",
        title="Compiled and eager results agree",
        statement="`torch.compile(module)` agrees with eager execution, within the bound.",
        source="torch.compile documentation; defect class: pytorch/pytorch#179578, #148545",
        differs=(
            "Inductor recognises explicit softmax(q k^T) v patterns and replaces them with a fused kernel, which "
            "rounds differently, so bits may differ where the bound holds."
        ),
    ),
    Clause(
        id="CMP-2",
        level="MAY",
        title="Exported programs agree at any size",
        statement=(
            "`torch.export` captures the module with dynamic B, L and S, and the exported program agrees with it."
        ),
        source="torch.export documentation (dynamic shapes)",
        differs=(
            "torch.nn.MultiheadAttention 2.13 can be exported so with `need_weights=False`; a program specialised to "
            "the example's sizes is the usual failure."
        ),
    ),
    Clause(
        id="CMP-3",
        level="MAY",
        title="torch.func transforms agree",
        statement=(
            "`torch.func.functional_call`, `vmap` over a batch of weights and `grad` agree with the plain module."
        ),
        source="torch.func documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 works under `vmap`, but warns that its fused kernels have no batching "
            "rule and fall back to a slow loop."
        ),
    ),
    Clause(
        id="CMP-4",
        level="MAY",
        title="Autocast stays within the bound",
        statement="Under autocast the result is within the low-precision bound.",
        source="torch.amp documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 returns bfloat16 for float32 inputs under bfloat16 autocast on the CPU."
        ),
    ),
    Clause(
        id="INC-1",
        level="MAY",
        title="Cached decoding equals one causal pass",
        statement="Decoding token by token with a key/value cache equals one causal pass over the whole sequence.",
        source=(
            "Shazeer 2019 (incremental multi-head attention); defect class: meta-pytorch/torchtune#959, "
            "lucidrains/x-transformers#311"
        ),
        differs=(
            "One query against the cache needs a bottom-right causal mask or none. F.scaled_dot_product_attention's "
            "`is_causal` is top-left, and would let that query see the first key alone."
        ),
    ),
    Clause(
        id="GQA-1",
        level="MAY",
        title="Grouped heads equal repeated heads",
        statement=(
            "With n_kv_heads < n_heads, the result equals repeating each key/value head n_heads / n_kv_heads times in "
            "succession."
        ),
        source=(
            "Ainslie et al. 2023; Shazeer 2019 for n_kv_heads = 1; F.scaled_dot_product_attention documentation "
            "(`enable_gqa`)"
        ),
        differs=(
            "F.scaled_dot_product_attention repeats each head in succession with `enable_gqa=True`, and without it "
            "raises, except that a single key/value head broadcasts. Tiling the heads instead (0, 1, 0, 1) pairs them "
            "differently: onnx/onnx#7274 proposes to replace a tile in the ONNX definition."
        ),
    ),
    Clause(
        id="XAT-1",
        level="MAY",
        title="Key and value widths may differ",
        statement="A kdim and a vdim that differ from D work, and match the oracle.",
        source="torch.nn.MultiheadAttention documentation (`kdim`, `vdim`)",
        differs=(
            "In torch.nn.MultiheadAttention these are widths of the inputs, and each head still has width d_k. Keras' "
            "`key_dim` and `value_dim` are widths of a head."
        ),
    ),
    Clause(
        id="DST-1",
        level="MAY",
        title="Sharded attention equals unsharded",
        statement=(
            "Sharded over ranks (by heads or by sequence), the gathered result and gradients match the single-process "
            "ones within the bound."
        ),
        source="Shoeybi et al. 2019 (heads over ranks); Liu et al. 2023, Ring Attention (sequence over ranks)",
        differs="Sharding W_o by heads adds partial sums across ranks: b_o must be added once, not once for each rank.",
    ),
)
