"""The merge of `torch.distributed.tensor.experimental.context_parallel`, without its ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger

from mha.implementations import from_merge
from mha.spec import Claims, Rounding


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts (B, H, L, d) and (B, H, L), as each step of ring attention does."""
    merger = _SDPAMerger(convert_to_f32=True, seq_dim=2)
    merger.step(o_a, lse_a, partial=False)
    merger.step(o_b, lse_b, partial=False)
    return merger.results()


implementation = from_merge(
    merge,
    name="torch-ring-merger",
    claims=Claims(
        masks={"bool", "float"},
        empty_row="nan",  # of two parts without a key, which LSE-2 is about
        gradients=False,
        dtypes={"float32", "bfloat16", "float16"},  # it computes in float32
        rounding=Rounding(softmax_stored=False, merges=4, reductions=4),
    ),
)
