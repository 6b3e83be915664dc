"""transformers' `BertSelfAttention`, eager and sdpa, with the dense layer of `BertSelfOutput` as
W_o.
"""

from functools import partial

import torch
from transformers.models.bert.modeling_bert import BertAttention, BertConfig

from mha.implementations import from_module
from mha.spec import Claims
from mha.spec.claims import COMPUTE_DTYPES


class Bert(BertAttention):
    def __init__(self, d_model, n_heads, dropout, attn):
        sizes = {"hidden_size": d_model, "num_attention_heads": n_heads}
        super().__init__(
            BertConfig(**sizes, attention_probs_dropout_prob=dropout, attn_implementation=attn)
        )
        del self.output.LayerNorm  # it would be a parameter that gets no gradient

    def forward(self, hidden_states, attention_mask=None):
        eager = self.self.config._attn_implementation == "eager"
        if attention_mask is not None and eager:  # as masking_utils.eager_mask does
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        context, weights = self.self(hidden_states, attention_mask)
        return self.output.dense(context), weights  # without the residual sum and the LayerNorm


OPTIONS = {
    "parameters": {
        "w_q": "self.query",
        "w_k": "self.key",
        "w_v": "self.value",
        "w_o": "output.dense",
    },
    "mask_shape": "b h l s",
}
CLAIMS = {
    "cross_attention": False,
    "masks": {"bool", "float"},
    "dropout": True,
    "bias": {True},
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
eager = from_module(
    partial(Bert, attn="eager"),
    name="bert-eager",
    mask="additive",
    claims=Claims(**CLAIMS, empty_row="uniform"),
    **OPTIONS,
)
sdpa = from_module(
    partial(Bert, attn="sdpa"),
    name="bert-sdpa",
    mask="keep",
    claims=Claims(**CLAIMS, returns_weights=False),
    **OPTIONS,
)
