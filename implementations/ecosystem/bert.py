"""transformers' `BertSelfAttention`, eager and sdpa, with the dense layer of `BertSelfOutput` as W_o."""

from functools import partial

import torch
from transformers.models.bert.modeling_bert import BertAttention, BertConfig

from mha.implementations import from_module
from mha.spec import Claims
from mha.spec.claims import COMPUTE_DTYPES


class Bert(BertAttention):
    def __init__(self, d_model, n_heads, dropout, attn):
        sizes = {"hidden_size": d_model, "num_attention_heads": n_heads}
        super().__init__(BertConfig(**sizes, attention_probs_dropout_prob=dropout, attn_implementation=attn))

    def forward(self, hidden_states, attention_mask=None):
        if (
            attention_mask is not None and self.self.config._attn_implementation == "eager"
        ):  # as masking_utils.eager_mask
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        context, weights = self.self(hidden_states, attention_mask)
        return self.output.dense(context), weights  # without the residual sum and the LayerNorm


names = {"w_q": "self.query", "w_k": "self.key", "w_v": "self.value", "w_o": "output.dense"}
usual = {"parameters": names, "mask_shape": "b h l s"}
plain = {"cross_attention": False, "masks": {"bool", "float"}, "dropout": True, "bias": {True}}
plain |= {"composes": {"compile", "func", "autocast"}, "dtypes": COMPUTE_DTYPES}
eager = from_module(partial(Bert, attn="eager"), name="bert-eager", **usual, mask="additive",
                    claims=Claims(**plain, empty_row="uniform"))  # fmt: skip
sdpa = from_module(partial(Bert, attn="sdpa"), name="bert-sdpa", **usual, mask="keep",
                   claims=Claims(**plain, returns_weights=False))  # fmt: skip
