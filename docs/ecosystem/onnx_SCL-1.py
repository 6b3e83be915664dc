# onnx 1.23.2 (reference evaluator), Attention-23 to 25: a negative scale gives NaN, since queries and keys are multiplied by its
# square root, as the operator's text says. onnxruntime 1.32 refuses a scale of 0, too.
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

given = dict.fromkeys("QKV", np.ones((1, 1, 2, 3), np.float32))
on_cpu = {"providers": ["CPUExecutionProvider"]}
for scale in (0.0, -1.0):
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], scale=scale)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "QKV"]
    outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    print(scale, "reference:", ReferenceEvaluator(model).run(None, given)[0][0, 0, 0])
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), **on_cpu)
        print(scale, "onnxruntime:", session.run(None, given)[0][0, 0, 0])
    except Exception as error:
        print(scale, "onnxruntime refuses:", str(error).strip()[-49:])
