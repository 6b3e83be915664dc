"""The CMP, INC, GQA, XAT and DST clauses: composition and variants, each a capability to claim."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CMP-1",
        level="MAY",
        title="Compiled and eager results agree",
        statement=(
            "`torch.compile(module, fullgraph=True)` agrees with eager execution within the bound, with and without "
            "gradients, and so do its gradients."
        ),
        why=(
            "Compiling is the usual way to make a model faster. If it changes the result, the model in production is "
            "not the one that was debugged. A part that silently runs uncompiled, which only `fullgraph` reveals, is "
            "not made faster."
        ),
        source="torch.compile documentation; known bugs: pytorch/pytorch#179578, #148545",
        differs=(
            "Inductor recognises explicit softmax(q k^T) v patterns and replaces them with a fused kernel, which "
            "rounds differently, so bits may differ where the bound holds."
        ),
        violation=(
            "A custom operator that adds the mask to the scores in place but is registered with `mutates_args=()`: the "
            "compiled program loses the change, and with it the mask."
        ),
    ),
    Clause(
        id="CMP-2",
        level="MAY",
        title="Exported programs agree at any size",
        statement=(
            "`torch.export` captures the module with dynamic B, L and S, and the exported program agrees with it."
        ),
        why=(
            "An exported program serves batches and lengths that its example did not have. If it is specialised to the "
            "example, it rejects them, and each size needs its own export."
        ),
        source="torch.export documentation (dynamic shapes)",
        differs=(
            "torch.nn.MultiheadAttention 2.13 can be exported this way with `need_weights=False`; a program "
            "specialised to the example's sizes is the usual failure."
        ),
        violation=(
            "`B, L = int(query.shape[0]), int(query.shape[1])`: `int` turns the sizes of the example into constants, "
            "and `torch.export` refuses to treat them as dynamic."
        ),
    ),
    Clause(
        id="CMP-3",
        level="MAY",
        title="torch.func transforms agree",
        statement=(
            "`torch.func.functional_call`, `vmap` over a batch of weights and `grad` agree with the plain module."
        ),
        why=(
            "Ensembles, per-sample gradients and meta-learning run the module through these transforms. Code that "
            "bypasses its parameters gives the result of other weights, or a gradient of zero."
        ),
        source="torch.func documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 works under `vmap`, but warns that its fused kernels have no batching "
            "rule and fall back to a slow loop."
        ),
        violation=(
            "A packed weight built once in `__init__` by `torch.cat`: `functional_call` replaces the three parameters, "
            "but the result is still that of the old ones."
        ),
    ),
    Clause(
        id="CMP-4",
        level="MAY",
        title="Autocast stays within the bound",
        statement=(
            "Under autocast, the result is within the low-precision bound and can be differentiated: where it is "
            "finite, so is every gradient."
        ),
        why=(
            "Mixed-precision training runs a whole model under autocast. Code that assumes float32 between its own "
            "lines overflows there, or raises on mixed dtypes."
        ),
        source="torch.amp documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 returns bfloat16 for float32 inputs under bfloat16 autocast on the CPU."
        ),
        violation=(
            "`scores.masked_fill(~mask, -1e9)` under float16 autocast: the scores are float16 there, and the fill "
            "raises."
        ),
    ),
    Clause(
        id="INC-1",
        level="MAY",
        title="Cached decoding equals one causal pass",
        statement=(
            "Decoding token by token with a key/value cache equals one causal pass over the whole sequence, for each "
            "item of the batch. Where `decodes_ragged` is claimed, items may differ in length."
        ),
        why=(
            "Language models are trained in one causal pass and served with a cache. If the two differ, the model that "
            "is served is not the one that was trained."
        ),
        source=(
            "Shazeer 2019 (incremental multi-head attention); known bugs: meta-pytorch/torchtune#959, "
            "lucidrains/x-transformers#311"
        ),
        differs=(
            "One query against the cache needs a bottom-right causal mask or none. The `is_causal` of "
            "F.scaled_dot_product_attention is top-left, and would let that query see only the first key."
        ),
        violation=(
            "`is_causal=True`, aligned top-left, for one query against the cache: each new token sees only the first "
            "key."
        ),
    ),
    Clause(
        id="GQA-1",
        level="MAY",
        title="Grouped heads equal repeated heads",
        statement=(
            "With `n_kv_heads < n_heads`, the result equals repeating each key/value head `n_heads / n_kv_heads` times "
            "in succession, and dropout works in the same way."
        ),
        why=(
            "A checkpoint with grouped heads fixes which query heads share a key. Other pairings fit the same shapes, "
            "so a pretrained model gives noise and nothing raises."
        ),
        source=(
            "Ainslie et al. 2023; Shazeer 2019 for n_kv_heads = 1; F.scaled_dot_product_attention documentation "
            "(`enable_gqa`)"
        ),
        differs=(
            "With `enable_gqa=True`, F.scaled_dot_product_attention repeats each head in succession; without it, it "
            "raises, except that a single key/value head broadcasts. Tiling the heads instead (0, 1, 0, 1) pairs them "
            "differently: onnx/onnx#7274 proposes to replace a tile in the ONNX definition."
        ),
        violation=(
            "`k.repeat(1, n_heads // n_kv_heads, 1, 1)`: it tiles two heads as 0, 1, 0, 1, where they must be repeated "
            "as 0, 0, 1, 1."
        ),
    ),
    Clause(
        id="XAT-1",
        level="MAY",
        title="Key and value widths may differ",
        statement="A `kdim` and a `vdim` that differ from D work, and match the oracle.",
        why=(
            "Text attends to images, and decoders attend to encoders of another width. Without this, an extra "
            "projection is needed in front, and checkpoints that have none do not load."
        ),
        source="torch.nn.MultiheadAttention documentation (`kdim`, `vdim`)",
        differs=(
            "In torch.nn.MultiheadAttention these are widths of the inputs, and each head still has width d_k. In "
            "Keras, `key_dim` and `value_dim` are widths of a head."
        ),
        violation="`nn.Linear(d_model, d_model)` for W_k whatever `kdim` is: a key of width `kdim` raises.",
    ),
    Clause(
        id="DST-1",
        level="MAY",
        title="Sharded attention equals unsharded",
        statement=(
            "Sharded over ranks (by heads or by sequence), the gathered result and gradients match the single-process "
            "ones within the bound."
        ),
        why=(
            "Models too large for one device are trained sharded, and checked on one device. A difference between the "
            "two does not show on any single rank."
        ),
        source="Shoeybi et al. 2019 (heads over ranks); Liu et al. 2023, Ring Attention (sequence over ranks)",
        differs="Sharding W_o by heads adds partial sums across ranks: b_o must be added once, not once per rank.",
        violation=(
            "Each rank adds b_o to its partial output before the sum over ranks: with 4 ranks, the result is 3 b_o too "
            "large."
        ),
        deferred="A test needs several processes, and no implementation claims it.",
    ),
)
