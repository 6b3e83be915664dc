# onnxruntime 1.32, GroupQueryAttention on the CPU: an empty batch ends the process by SIGFPE, a division by zero.
import subprocess
import sys

PROGRAM = """
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
x = np.zeros((0, 3, 8), np.float32)
feeds = dict.fromkeys(("query", "key", "value"), x) | {"bias": np.zeros((1, 1, 3, 3), np.float32)}
session.run(["y"], feeds | {"lengths": np.zeros(0, np.int32), "total": np.array(3, np.int32)})
"""
print("exit status", subprocess.run([sys.executable, "-c", PROGRAM]).returncode)
