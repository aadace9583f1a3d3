"""Weights in few bits of exports of OpenVINO: a constant of integers, less a zero point, times a scale."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness.extensions.exports.packed import PackedWeight, halves, refuse
from harness.extensions.llamacpp.gguf.model import missing_package

GRAPH_NAME = "openvino_model.xml"
_BITS = {"u4": 4, "i4": 4, "u8": 8, "i8": 8}
_NAME = ("self.", ".weight")
"""Before and behind the path of a module, in the name of its weight's constant."""


def packed_weights(export: Path) -> Iterator[PackedWeight]:
    """Yield the weights.

    Raises:
        HarnessError: PACKAGE_MISSING (openvino); UNKNOWN_QUANTISATION.
    """
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise missing_package("openvino", error, "pip install -e '.[openvino]' in the harness's checkout") from error
    try:
        model = openvino.Core().read_model(export / GRAPH_NAME)
    except RuntimeError as error:
        refuse("the export cannot be read", export / GRAPH_NAME, actual=str(error).strip()[-200:])
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "Constant" or not name.startswith(_NAME[0]) or not name.endswith(_NAME[1]):
            continue
        if node.get_element_type().is_integral():
            yield _weight(node, name.removeprefix(_NAME[0]).removesuffix(_NAME[1]))


def _weight(constant: Any, module: str) -> PackedWeight:
    """Follow a constant: Convert, Subtract if it has zero points, Multiply."""
    kind = _type(constant)
    if kind not in _BITS:
        refuse("codes of this type are not read", module, expected=", ".join(_BITS), actual=kind)
    bits, middle = _BITS[kind], 1 << (_BITS[kind] - 1)
    node, zero = _reader(_reader(constant, "Convert"), "Subtract", "Multiply"), None
    num_outputs = int(constant.shape[0])
    if node.get_type_name() == "Subtract":
        stored = _constant(node.input_value(1).get_node())
        if _type(stored) != kind:
            what = "zero points of another type than their codes are not read"
            refuse(what, module, expected=kind, actual=_type(stored))
        zero, node = _codes(stored).reshape(num_outputs, -1), _reader(node, "Multiply")
    scale = torch.from_numpy(_constant(node.input_value(1).get_node()).data.copy()).reshape(num_outputs, -1)
    codes = _codes(constant).reshape(num_outputs, -1)
    if kind.startswith("i"):  # from -8: the middle of those that are counted from 0
        codes, zero = codes ^ middle, None if zero is None else zero ^ middle
    elif zero is None:
        zero = torch.zeros_like(scale, dtype=torch.uint8)
    return PackedWeight(module=module, bits=bits, codes=codes, scale=scale, zero=zero)


def _type(node: Any) -> str:
    name: str = node.get_element_type().to_string()
    return name


def _codes(constant: Any) -> torch.Tensor:
    """Return the codes of a constant in its own shape, signed ones as the bytes or halves that they are: uint8."""
    stored = torch.from_numpy(constant.data.copy()).view(torch.uint8)
    codes = stored if _BITS[_type(constant)] == 8 else halves(stored)
    return codes.flatten()[: torch.Size(constant.shape).numel()].reshape(list(constant.shape))


def _reader(node: Any, *kinds: str) -> Any:
    """Return what reads a node, which is of one of some kinds."""
    readers = [item.get_node() for item in node.output(0).get_target_inputs()]
    matching = [reader for reader in readers if reader.get_type_name() in kinds]
    if len(matching) != 1:
        names = ", ".join(reader.get_type_name() for reader in readers)
        refuse("a weight is not read", node.get_friendly_name(), expected=" or ".join(kinds), actual=names)
    return matching[0]


def _constant(node: Any) -> Any:
    """Return the constant behind a conversion."""
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        refuse("a weight is not read", node.get_friendly_name(), expected="Constant", actual=node.get_type_name())
    return node
