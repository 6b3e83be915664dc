# transformers 5.24, "flex_attention": of a mask that differs between heads, all heads get that of the first one.
# integrations/flex_attention.py, score_mod: `score_mask[batch_idx][0][q_idx][kv_idx]`.
import torch
from transformers import PreTrainedModel  # noqa: F401  fills the table of functions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Layer:
    training, is_causal, num_key_value_groups = False, False, 1


q = torch.zeros(1, 2, 1, 8)
value = torch.eye(2, 8).expand(1, 2, 2, 8)
mask = torch.zeros(1, 2, 1, 2)
mask[0, 0, 0, 1] = mask[0, 1, 0, 0] = float("-inf")  # head 0 sees the first key, head 1 the second
for name in ("sdpa", "flex_attention"):
    with torch.compiler.set_stance("force_eager"):
        output = ALL_ATTENTION_FUNCTIONS[name](Layer(), q, value, value, mask)[0]
    print(name, "sees keys", output[0, 0, :, :2].argmax(-1).tolist())
