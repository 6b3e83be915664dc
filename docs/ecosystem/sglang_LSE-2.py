# sglang 0.5.23, merge_state_triton: two parts without a key, zeros and -infinity, give NaN: exp(-inf - -inf). In Triton's
# interpreter, its file alone. The same was mended in vLLM (PR 39148), from which the kernel is, and is open in FlashInfer (4051).
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch

(folder,) = importlib.util.find_spec("sglang").submodule_search_locations
file = f"{folder}/kernels/ops/attention/merge_state.py"
spec = importlib.util.spec_from_file_location("merge_state", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
nothing = torch.zeros(1, 1, 4), torch.full((1, 1), -torch.inf)
ones = torch.ones(1, 1, 4), torch.zeros(1, 1)
for name, parts in (("nothing and ones", (*nothing, *ones)), ("nothing twice", nothing * 2)):
    context, lse = module.merge_state_triton(*parts)
    print(name, context[0, 0].tolist(), lse[0, 0].item())
