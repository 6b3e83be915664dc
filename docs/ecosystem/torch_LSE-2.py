# torch 2.13, the merge of context_parallel: a first part without a key gives the log-sum-exp NaN, and with the next part so does
# the output: `lse - F.logsigmoid(lse - block_lse)` is -inf - -inf. With is_causal, each rank's first part is its own, and has keys.
import torch
from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger

nothing = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
ones = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
for name, parts in (
    ("ones, nothing, ones", (ones, nothing, ones)),
    ("nothing, ones, ones", (nothing, ones, ones)),
):
    merger = _SDPAMerger(convert_to_f32=True, seq_dim=2)
    for output, lse in parts:
        merger.step(output, lse, partial=False)
    output, lse = merger.results()
    print(name, output[0, 0, 0].tolist(), lse[0, 0, 0].item())
