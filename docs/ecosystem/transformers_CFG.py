# transformers 5.23.0: CFG-3 negative sizes are accepted (8 % -2 == 0); CFG-6 so is any dropout probability.
from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

for make, config, drop in (
    (lambda c: LlamaAttention(c, 0), LlamaConfig, "attention_dropout"),
    (GPT2Attention, GPT2Config, "attn_pdrop"),
    (BertSelfAttention, BertConfig, "attention_probs_dropout_prob"),
    (ViTAttention, ViTConfig, "attention_probs_dropout_prob"),
):
    for sizes in (
        {"hidden_size": 10, "num_attention_heads": 3},
        {"hidden_size": 8, "num_attention_heads": -2},
        {"hidden_size": 8, "num_attention_heads": 2, drop: -0.1},
        {"hidden_size": 8, "num_attention_heads": 2, drop: 1.5},
    ):
        try:
            make(config(**sizes))
            print(config.__name__, sizes, "built")
        except Exception as error:
            print(config.__name__, sizes, type(error).__name__, str(error).replace("\n", " ")[:100])
