# onnxruntime 1.32, GroupQueryAttention on the CPU: where all keys have a bias of -infinity, a single query gets NaN, and each of
# several gets zeros; of the lowest number of float32, a single query gets the mean. A NaN in the last key that a query sees makes
# its output zeros, where the next queries get NaN.
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

names = ["query", "key", "value", "", "", "lengths", "total", "", "", "", "bias"]
domain = {"domain": "com.microsoft"}
node = helper.make_node(
    "GroupQueryAttention", names, ["y", "k", "v"], num_heads=1, kv_num_heads=1, **domain
)
kinds = dict.fromkeys(("query", "key", "value", "bias"), TensorProto.FLOAT)
kinds |= {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "ykv"]
graph = helper.make_graph([node], "attention", inputs, outputs)
opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def attend(key, bias):
    length = key.shape[1]
    query, value = np.zeros_like(key), np.eye(length, 8, dtype=np.float32)[None]
    feeds = {"query": query, "key": key, "value": value, "bias": bias}
    feeds |= {"lengths": np.array([length - 1], np.int32), "total": np.array(length, np.int32)}
    return session.run(["y"], feeds)[0][0, :, :length].tolist()


for length in (1, 3):
    key, bias = np.zeros((1, length, 8), np.float32), np.zeros((1, 1, length, length), np.float32)
    print(length, "queries, no key:", attend(key, bias - np.inf))
key[0, 1] = np.nan
print("NaN in the second key:", attend(key, bias))
