# transformers 5.23.0: without a mask, LlamaAttention and GPT2Attention attend to everything in "eager", and causally in "sdpa".
# integrations/sdpa_attention.py: is_causal = getattr(module, "is_causal", True); eager_attention_forward has no is_causal.
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

torch.manual_seed(0)
x, outputs = torch.randn(1, 4, 8), {}
for name in ("eager", "sdpa"):
    torch.manual_seed(0)
    module = GPT2Attention(GPT2Config(n_embd=8, n_head=2, attn_implementation=name)).eval()
    torch.nn.init.normal_(module.c_attn.weight)
    outputs[name] = module(x)[0], module(x, is_causal=True)[0]
print(
    "no mask:       eager - sdpa =", (outputs["eager"][0] - outputs["sdpa"][0]).abs().max().item()
)
print(
    "is_causal=True: eager - sdpa =", (outputs["eager"][1] - outputs["sdpa"][1]).abs().max().item()
)
