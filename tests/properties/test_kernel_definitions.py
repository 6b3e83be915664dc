"""The definition of a kernel and the online softmax agree, with every option, and conform."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mha.implementations import resolve
from mha.implementations.kernel_loop import attend as defined
from mha.implementations.merge import merge
from mha.implementations.online_softmax import attend as online
from support.judging import expect_conforms

OPTIONS: dict[str, Any] = {
    "mask": torch.rand(3, 1, 40, 70, generator=torch.Generator().manual_seed(1)) < 0.8,
    "causal": True,
    "softmax_scale": 0.3,
    "softcap": 2.0,
    "window_size": (50, -1),
    "attention_chunk": 64,
    "alibi_slopes": torch.tensor([[0.5, -0.25, 0.0, 0.125]]).expand(3, 4),
    "sinks": torch.tensor([0.5, -1.0, 20.0, -torch.inf]),
    "seqused_q": torch.tensor([40, 7, 0]),
    "seqused_k": torch.tensor([70, 0, 33]),
}


@pytest.mark.parametrize("name", ["kernel_loop", "online_softmax"])
def test_kernels_with_every_option_conform(name: str) -> None:
    (resolved,) = resolve(name)
    clauses = ["CHK-1", "ALB-1", "SNK-1", "LSE-1", "LEN-1", "GQA-1", "MSK-10"]
    expect_conforms(resolved.implementation, clauses, dtypes=["float32", "bfloat16"])


@pytest.mark.parametrize("left_out", ["", *OPTIONS])
def test_kernels_agree_with_all_options_at_once(left_out: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 40, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(3, 2, 70, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(3, 2, 70, 5, generator=generator, dtype=torch.float64)
    options = {name: value for name, value in OPTIONS.items() if name != left_out}
    for own, other in zip(
        defined(q, k, v, **options, return_lse=True),
        online(q, k, v, **options, return_lse=True),
        strict=True,
    ):
        past = torch.arange(40) >= options.get("seqused_q", torch.tensor([40] * 3)).unsqueeze(1)
        mask = past[:, None] if own.ndim == 3 else past[:, None, :, None]
        torch.testing.assert_close(own.masked_fill(mask, 0), other.masked_fill(mask, 0))


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    cut = slice(None, 4), slice(4, None)
    parts = [online(q, k[:, :, part], v[:, :, part], return_lse=True) for part in cut]
    merged = merge(*parts[0], *parts[1])
    for own, whole in zip(merged, defined(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(own, whole)
