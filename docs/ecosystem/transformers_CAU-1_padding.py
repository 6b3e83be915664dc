# transformers 5.23.0, "eager": a query with nothing but padding before it attends to the positions after it.
# masking_utils.eager_mask fills padding and later positions with the same lowest number, so in such a row all keys are equal.
import torch
from transformers.masking_utils import eager_mask
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

torch.manual_seed(0)
module = GPT2Attention(GPT2Config(n_embd=8, n_head=2, attn_implementation="eager")).eval()
torch.nn.init.normal_(module.c_attn.weight)
x, padding = torch.randn(1, 4, 8), torch.tensor([[False, True, True, True]])  # True = a token
mask = eager_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=padding)
changed = x.clone()
changed[:, 3] += 1.0
difference = (
    (module(changed, attention_mask=mask)[0] - module(x, attention_mask=mask)[0]).abs().amax(-1)[0]
)
print("the last input changed; the outputs before it changed by:", difference[:3].tolist())
