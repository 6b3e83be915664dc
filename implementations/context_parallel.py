"""PyTorch's own `torch.distributed.tensor.experimental.context_parallel`, as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.placement_types import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha.implementations.adapters.sharded import from_sharded, gathered_lengths
from mha.spec import Claims, Sizes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    mesh: DeviceMesh,
) -> Tensor:
    """Return this rank's context; see `from_sharded`.

    Of torch's kernels for the CPU only the plain formula runs in it (in torch 2.13), without a mask
    and without a causal flag (pytorch/pytorch#147793), so neither is claimed. Of lengths that twice
    the number of ranks does not divide, some end a rank and some make it wait for ever.
    """
    # It shards buffers that are whole, and refuses lengths that it cannot shard; the inputs are
    # sharded already.
    whole = torch.zeros(sum(gathered_lengths(query.shape[2], mesh, query.device)))
    with sdpa_kernel(SDPBackend.MATH), context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]):
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)


implementation = from_sharded(
    attend,
    placements=Shard(2),
    claims=Claims(
        cross_attention=False,
        masks=(),
        causal=None,
        returns_weights=False,
        world_sizes={2, 4},
        devices={"cpu"},
        sizes=Sizes(length_multiple=8),
    ),
    name="context_parallel",
)
