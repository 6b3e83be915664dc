# onnx 1.23.2 (reference evaluator) and onnxruntime 1.32, Attention-25: a NaN in a value past `nonpad_kv_seqlen` reaches every
# output of its item, as 0 * NaN. Buffers that are allocated but not written, as of a cache, may hold one.
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node("Attention", ["Q", "K", "V", "", "", "", "lengths"], ["Y"])
kinds = dict.fromkeys("QKV", TensorProto.FLOAT) | {"lengths": TensorProto.INT64}
inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)]
graph = helper.make_graph([node], "attention", inputs, outputs)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
x = np.zeros((1, 1, 2, 3), np.float32)
value = x + np.array([1, np.nan], np.float32)[:, None]
feeds = {"Q": x, "K": x, "V": value, "lengths": np.array([1])}  # of two keys, the first one
on_cpu = {"providers": ["CPUExecutionProvider"]}
session = onnxruntime.InferenceSession(model.SerializeToString(), **on_cpu)
for name, runner in (("reference", ReferenceEvaluator(model)), ("onnxruntime", session)):
    print(name, runner.run(None, feeds)[0][0, 0].tolist())
