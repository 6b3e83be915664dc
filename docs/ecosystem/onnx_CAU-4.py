# onnx 1.23.2, reference evaluator, Attention-23 to 25: beside a mask that is the same for all queries, as of padding, the causal
# mask has one query, so that every query sees the first key only. op_attention.py, _apply_causal: `base.shape[-2:]`, of the mask.
# onnxruntime 1.32 refuses such a mask in Attention-23, though it is broadcastable, and is right in Attention-25 with lengths.
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"], is_causal=1)
kinds = dict.fromkeys("QKV", TensorProto.FLOAT) | {"mask": TensorProto.BOOL}
inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)]
graph = helper.make_graph([node], "attention", inputs, outputs)
model = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))
x = np.zeros((1, 1, 3, 3), np.float32)
inputs = {"Q": x, "K": x, "V": x + np.eye(3, dtype=np.float32)}
for name, shape in (("for each query", (1, 1, 3, 3)), ("for all queries", (1, 1, 1, 3))):
    (y,) = model.run(None, inputs | {"mask": np.ones(shape, bool)})  # hides nothing
    print("mask", name, "- weights of the last query:", y[0, 0, 2].tolist())
