# transformers 5.24, "sdpa": sinks (`s_aux`) and `sliding_window` are accepted and have no effect; `softcap` is refused. gpt-oss
# and Gemma 2 declare that they do not support "sdpa"; a layer of one's own that asks for it gets no warning.
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Layer:
    training, is_causal, num_key_value_groups = False, True, 1


q = torch.randn(1, 2, 5, 8)
sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
plain = sdpa(Layer(), q, q, q, None)[0]
for name, value in (("s_aux", torch.full((2,), 9.0)), ("sliding_window", 2), ("softcap", 1.0)):
    try:
        output = sdpa(Layer(), q, q, q, None, **{name: value})[0]
        print(name, "changes something:", not torch.equal(output, plain))
    except ValueError as error:
        print(name, "refused:", error)
