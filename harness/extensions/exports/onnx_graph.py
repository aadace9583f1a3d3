"""Weights in few bits of exports of ONNX Runtime GenAI: nodes `MatMulNBits`, and a head that is the embedding, too."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.extensions.exports.packed import EMBEDDING, PackedWeight, halves, refuse
from harness.extensions.llamacpp.gguf.model import missing_package

GRAPH_NAME, SETTINGS_NAME = "model.onnx", "genai_config.json"
_PRODUCT, _EMBEDDING = "MatMulNBits", "GatherBlockQuantized"
_ATTRIBUTES = {"K", "N", "bits", "block_size", "accuracy_level"}
"""Of a product, those that are understood: others say that its weights are packed in another way."""
_INT8 = 4
"""Accuracy level from which the inputs of a product are in int8, with a scale for each block."""
Read = Callable[[str], torch.Tensor]


def packed_weights(export: Path) -> Iterator[PackedWeight]:
    """Yield the weights.

    Raises:
        HarnessError: PACKAGE_MISSING (onnx); UNKNOWN_QUANTISATION.
    """
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise missing_package("onnx", error, "pip install -e '.[onnxruntime]' in the harness's checkout") from error
    try:
        model = onnx.load(export / GRAPH_NAME)
    except Exception as error:  # protobuf's own, which onnx does not name
        refuse("the export cannot be read", export / GRAPH_NAME, actual=str(error)[:200])
    tensors = {item.name: item for item in model.graph.initializer}
    integers = {getattr(onnx.TensorProto, name) for name in ("UINT8", "INT8", "UINT4", "INT4")}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(tensors[name]).copy())

    by_scale: dict[str, PackedWeight] = {}
    for node in model.graph.node:
        if node.op_type == _PRODUCT:
            attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            by_scale[node.input[2]] = _weight(node, attributes, read)
    yield from by_scale.values()
    for node in model.graph.node:
        if node.op_type == _EMBEDDING and node.input[2] in by_scale:  # the head's weight, read by the row
            yield replace(by_scale[node.input[2]], module=EMBEDDING, has_inputs_in_int8=False)
        elif node.op_type not in (_PRODUCT, "Reshape"):
            reads_codes = any(name in tensors and tensors[name].data_type in integers for name in node.input)
            if reads_codes or node.op_type == _EMBEDDING:
                refuse("an operator with weights in few bits is not read", export, actual=node.op_type)


def _weight(node: Any, attributes: Mapping[str, Any], read: Read) -> PackedWeight:
    num_outputs, num_inputs, block = (int(attributes[name]) for name in ("N", "K", "block_size"))
    bits, others = int(attributes.get("bits", 4)), [name for name in node.input[3:] if name]
    codes, unknown = read(node.input[1]), sorted(set(attributes) - _ATTRIBUTES)
    if bits not in (4, 8) or num_inputs % block or codes.dtype != torch.uint8 or len(others) > 1 or unknown:
        what = "a product is not read"
        expected = f"{_PRODUCT} of 4 or 8 bits, whole blocks, and no more inputs than zero points"
        actual = f"{bits} bits, {num_inputs} inputs in blocks of {block}, codes in {codes.dtype}, {[*others, *unknown]}"
        refuse(what, node.name, expected=expected, actual=actual)
    zero = None
    if others:
        zero = read(others[0])
        if zero.dtype != torch.uint8:
            refuse("zero points that are no codes are not read", node.name, expected="uint8", actual=zero.dtype)
        zero = _codes(zero.reshape(num_outputs, -1), bits)[:, : num_inputs // block]
    return PackedWeight(
        module=node.name.strip("/").rpartition("/")[0].replace("/", ".").replace(".attn.", ".self_attn."),
        bits=bits,
        codes=_codes(codes.reshape(num_outputs, -1), bits),
        scale=read(node.input[2]).reshape(num_outputs, -1),
        zero=zero,
        has_inputs_in_int8=int(attributes.get("accuracy_level", 0)) == _INT8,
    )


def _codes(stored: torch.Tensor, bits: int) -> torch.Tensor:
    return stored if bits == 8 else halves(stored)
