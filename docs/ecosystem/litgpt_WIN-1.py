"""litgpt: a layer with a sliding window drops the mask that it is given.

`CausalSelfAttention` puts its window in the place of the mask instead of joining both, so padding
is attended to. A layer without a window keeps the mask.
"""

import torch
from litgpt import Config
from litgpt.model import CausalSelfAttention

for window in (None, 4):
    indices = None if window is None else [1]
    config = Config(
        n_layer=1,
        n_head=1,
        n_embd=8,
        rotary_percentage=1.0,
        sliding_window_size=window,
        sliding_window_indices=indices,
    )
    torch.manual_seed(0)
    attention = CausalSelfAttention(config, block_idx=0)
    cos, sin = torch.ones(1, 3, 8), torch.zeros(1, 3, 8)
    padding_first = torch.tensor([False, True, True])
    mask = (padding_first & torch.ones(3, 3).tril().bool())[None, None]
    x = torch.randn(1, 3, 8)
    other = x.clone()
    other[:, 0] += 1
    last = [attention(each, cos, sin, mask)[:, -1] for each in (x, other)]
    change = (last[0] - last[1]).abs().max().item()
    print(f"sliding_window_size={window}: what is masked changes the last output by {change:.2g}")
assert change == 0, "a masked token changes the output of a layer with a window"
