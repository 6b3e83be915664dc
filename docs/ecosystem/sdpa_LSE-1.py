# torch 2.13, CPU: the flash operator returns 0.0 as the log-sum-exp of a row without a key, so that a merge gives this part
# the weight of one key with the score 0. FlashAttentionKernel.cpp sets maximum and sum of such a row to 0 and 1, for its output.
import torch

q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 3, 8)
mask = torch.zeros(1, 1, 2, 3)
mask[0, 0, 1] = float("-inf")
operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_, lse = operator(q, k, k, 0.0, False, attn_mask=mask)
print("three keys, no key:", lse[0, 0].tolist())
print("should be:", (q @ k.mT + mask).logsumexp(-1)[0, 0].tolist())
