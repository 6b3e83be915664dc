"""The GQA, XAT and VAL clauses: grouped heads, and keys and values of other widths."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="GQA-1",
        level="MAY",
        title="Grouped heads equal repeated heads",
        statement=(
            "With `n_kv_heads < n_heads`, the result equals repeating each key/value head `n_heads"
            " / n_kv_heads` times in succession, and dropout works in the same way."
        ),
        why=(
            "A checkpoint with grouped heads fixes which query heads share a key. Other pairings"
            " fit the same shapes, so a pretrained model gives noise and nothing raises."
        ),
        source=(
            "Ainslie et al. 2023; Shazeer 2019 for n_kv_heads = 1; F.scaled_dot_product_attention"
            " documentation (`enable_gqa`)"
        ),
        differs=(
            "With `enable_gqa=True`, F.scaled_dot_product_attention repeats each head in"
            " succession; without it, it raises, except that a single key/value head broadcasts."
            " Tiling the heads instead (0, 1, 0, 1) pairs them differently: onnx/onnx#7274 proposes"
            " to replace a tile in the ONNX definition."
        ),
        violation=(
            "`k.repeat(1, n_heads // n_kv_heads, 1, 1)`: it tiles two heads as 0, 1, 0, 1, where"
            " they must be repeated as 0, 0, 1, 1."
        ),
        fix=(
            "Repeat keys and values alike, `x.repeat_interleave(n_heads // n_kv_heads, dim=1)`"
            " instead of `repeat`; or pass `enable_gqa=True`."
        ),
    ),
    Clause(
        id="XAT-1",
        level="MAY",
        title="Key and value widths may differ",
        statement="A `kdim` and a `vdim` that differ from D work, and match the oracle.",
        why=(
            "Text attends to images, and decoders attend to encoders of another width. Without"
            " this, an extra projection is needed in front, and checkpoints that have none do not"
            " load."
        ),
        source="torch.nn.MultiheadAttention documentation (`kdim`, `vdim`)",
        differs=(
            "In torch.nn.MultiheadAttention these are widths of the inputs, and each head still has"
            " width d_k. In Keras, `key_dim` and `value_dim` are widths of a head."
        ),
        violation=(
            "`nn.Linear(d_model, d_model)` for W_k whatever `kdim` is: a key of width `kdim`"
            " raises."
        ),
        fix="`nn.Linear(kdim, ...)` for W_k and `nn.Linear(vdim, ...)` for W_v.",
    ),
    Clause(
        id="VAL-1",
        level="MAY",
        title="Values may have a width of their own",
        statement=(
            "Where the heads of values have a width d_v that is not d_k, the context has d_v"
            " columns for each head, and every one of them matches the oracle. The scale stays"
            " 1/sqrt(d_k)."
        ),
        why=(
            "Latent attention, as in DeepSeek's models, has queries and keys of width 192 and"
            " values of width 128. A kernel that takes one width for the other drops columns, or"
            " reads those of the next head."
        ),
        source=(
            "F.scaled_dot_product_attention documentation (`value`: (N, ..., S, Ev)); DeepSeek-AI"
            " 2024, section 2.1"
        ),
        differs=(
            "F.scaled_dot_product_attention takes any width; on a GPU, only some of its kernels do."
            " Flash-attention 3 takes certain pairs of widths."
        ),
        violation=(
            "`out = torch.empty_like(q)` for the contexts: they have the width of the queries."
        ),
        fix=(
            "Make contexts of the width of the values, `q.new_empty(*q.shape[:-1], v.shape[-1])`,"
            " and scale by d_k's."
        ),
    ),
)
