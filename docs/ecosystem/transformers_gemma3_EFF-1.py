"""transformers 5.24.0: Gemma3Attention caps no scores, whatever `attn_logit_softcapping` says.

modeling_gemma3.py keeps the number and does not pass it on, as Gemma2Attention does. The config
documents it as the factor of "tanh softcapping on the attention scores".
"""

import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3TextConfig

x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
tables = torch.ones(1, 4, 8), torch.zeros(1, 4, 8)
for cls, config in ((Gemma2Attention, Gemma2Config), (Gemma3Attention, Gemma3TextConfig)):
    outputs = []
    for cap in (None, 0.01):
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        options = config(**sizes, head_dim=8, attn_logit_softcapping=cap)
        outputs.append(cls(options, layer_idx=0)(x, tables, None)[0])
    print(cls.__name__, "has an effect of a cap of 0.01:", not torch.equal(*outputs))
