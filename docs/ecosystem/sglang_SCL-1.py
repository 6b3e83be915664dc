# sglang 0.5.23, extend_attention_fwd: `sm_scale or 1.0 / (Lq**0.5)`, so that a scale of 0 is the default, where
# context_attention_fwd has `if sm_scale is None`; and a window of 0, the query's own key, is no window (`SLIDING_WINDOW_SIZE > 0`).
# A sink takes no part in the maximum: 89 above the scores, its exponential makes the log-sum-exp infinite.
# In Triton's interpreter; what the file asks of the device is answered as where there is no GPU.
import importlib
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
import torch

(folder,) = importlib.util.find_spec("sglang").submodule_search_locations
no = lambda: False  # noqa: E731  a function in one line
asked = ("is_cuda", "is_hip", "is_gfx95_supported", "is_gfx1250_supported")
unset = types.SimpleNamespace(get=no)
stand_ins = {
    "srt": {},
    "srt.environ": {"envs": types.SimpleNamespace(SGLANG_TRITON_FP8_PREFILL_ATTN=unset)},
    "srt.utils": dict.fromkeys(asked, no) | {"get_device_core_count": lambda: 1},
}
for name in ("", "kernels", "kernels.ops", "kernels.ops.attention", *stand_ins):
    module = types.ModuleType(f"sglang.{name}".rstrip("."))
    module.__path__ = [os.path.join(folder, *name.split("."))]
    vars(module).update(stand_ins.get(name, {}))
    sys.modules[module.__name__] = module
kernels = importlib.import_module("sglang.kernels.ops.attention.extend_attention")

L = 4
q, k, weights = torch.ones(L, 1, 8), torch.randn(L, 1, 8), torch.eye(L)[:, None]
offsets, none = torch.tensor([0, L], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


def last_row(**options):
    out = torch.empty(L, 1, L)
    slots = torch.zeros(1, dtype=torch.int64)
    tensors = (q, k, weights, out, k, weights, offsets, none, slots, None)
    kernels.extend_attention_fwd(*tensors, True, None, L, 1.0, 1.0, **options)
    return [round(x, 3) for x in out[-1, 0].tolist()]


print("weights by default", last_row())
print("with a scale of 0 ", last_row(sm_scale=0.0))
print("with a window of 1", last_row(sliding_window_size=1))
print("with a window of 0", last_row(sliding_window_size=0))
lse = torch.empty(L, 1)
last_row(sinks=torch.tensor([0.0]), lse_extend=lse, sm_scale=-100.0 / k[0].sum().item())
print("log-sum-exp of the score -100 and a sink of 0:", lse[0, 0].item())
