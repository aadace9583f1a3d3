"""ONNX Runtime with an export by torch: `pip install onnx onnxscript onnxruntime`. All its values are dumped."""

import numpy as np
import onnx
import onnxruntime
import torch
from transformers import LlamaForCausalLM

DTYPES = ("float32",)
LACKS = ("cache",)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def export(model, ids, path):
    torch.onnx.export(Logits(model.eval()), (torch.tensor([ids]),), str(path), dynamo=True, verbose=False)


def write(path, ids, out):
    out.mkdir()
    graph = onnx.shape_inference.infer_shapes(onnx.load(path))
    shown = {item.name for item in graph.graph.output}
    kinds = (onnx.TensorProto.FLOAT,)
    graph.graph.output.extend(
        item for item in graph.graph.value_info if item.name not in shown and item.type.tensor_type.elem_type in kinds
    )
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    names = [item.name for item in session.get_outputs()]
    for at, array in enumerate(session.run(names, {session.get_inputs()[0].name: np.array([ids])})):
        np.save(out / f"{at:04}-{names[at]}.npy", array)


# mistakes
from continuous_batching import plant


def dump(folder, dtype, fault, ids, out):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plant(model, fault)
    export(model, ids, folder / "model.onnx")
    write(folder / "model.onnx", ids, out)
