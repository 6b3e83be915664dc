"""The lines of docs/embedding.md run."""

from __future__ import annotations

from typing import Any

import torch

from mha.spec import Window
from support.embedded_kernels import in_float32, kernel_of
from support.folders import ROOT


def test_the_lines_to_paste_run() -> None:
    page = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
    _, lines, *_ = page.split("```")
    program = lines.removeprefix("python\n").replace("seconds=5", "seconds=0.5")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=generator).bfloat16() for _ in range(3))
    right = kernel_of(in_float32)
    context, lse = right(q, k, v, is_causal=True, window_size=(127, 0))

    def kernel(
        q: Any, k: Any, v: Any, attn_mask: Any = None, causal: Any = False, **options: Any
    ) -> Any:
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        context, lse = right(*inputs, attn_mask=attn_mask, is_causal=causal, **options)
        return context.transpose(1, 2), lse

    def call(kernel: Any, built: Any) -> Any:
        options = built.options
        window = Window("left_right").numbers(options.window or (None, None))
        given = {"scale": options.scale, "window_size": window}
        return right(*built.inputs, options.mask, options.is_causal, **given)

    names: dict[str, Any] = {"q": q, "k": k, "v": v, "context": context, "lse": lse}
    names |= {"device": "cpu", "kernel": kernel, "call": call}
    exec(program, names)
    assert names["verdict"].ok, names["verdict"].text
    statuses = {verdict.status for verdict in names["report"].verdicts}
    # How far it gets depends on the machine: this kernel has no name for a scale.
    assert statuses - {"not_claimed"} == {"pass"}
