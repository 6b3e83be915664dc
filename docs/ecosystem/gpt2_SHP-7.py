# transformers 5.23.0: GPT2Attention rejects an input that is not contiguous; Llama, BERT and ViT accept it.
# pytorch_utils.py, Conv1D.forward: `torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)`.
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

module = GPT2Attention(GPT2Config(n_embd=8, n_head=2, attn_implementation="eager")).eval()
for name, x in (
    ("contiguous", torch.randn(2, 3, 8)),
    ("transposed", torch.randn(3, 2, 8).transpose(0, 1)),
):
    try:
        print(name, tuple(module(x)[0].shape))
    except RuntimeError as error:
        print(name, "rejected:", error)
