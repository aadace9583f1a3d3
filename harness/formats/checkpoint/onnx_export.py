"""Exports of ONNX Runtime GenAI with weights in few bits, as the checkpoint of packed integers that they are.

A node `MatMulNBits` reads codes of blocks of inputs, the lowest bits first, with a scale for each block: the bits of
compressed-tensors' packed integers. So an export is written as such a checkpoint, and read as any other quantised one.
What is not quantised in it is taken from the checkpoint that it was made from, which is what it should be.

`O` outputs, `I` inputs, `G` blocks of inputs.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.base.json_text import json_digest
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.dequantised import made_once, write_shards
from harness.formats.checkpoint.gguf.weights import missing_package
from harness.formats.checkpoint.stamp import FileStamp

if TYPE_CHECKING:
    import torch

GRAPH_NAME = "model.onnx"
INFO_NAME = "onnx_export.json"
_SETTINGS_NAME = "genai_config.json"
_VERSION = 1
"""Part of a folder's name: raise it with every change of what is written."""
_OPERATOR = "MatMulNBits"
_EMBEDDING, _EMBEDDING_NAME = "GatherBlockQuantized", "model.embed_tokens"
_ATTRIBUTES = {"K", "N", "bits", "block_size", "accuracy_level"}
"""Of such a node, those that are understood: others say that its weights are packed in another way."""
_INT8 = 4
"""Accuracy level from which the inputs of a product are in int8, with a scale for each block."""
_FUSED = "qkv_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A node with weights in few bits."""

    module: str
    """HF's name, or what the export fuses: `model.layers.0.self_attn.qkv_proj`."""
    bits: int
    block: int
    has_inputs_in_int8: bool
    packed: "torch.Tensor"
    """[O, I * bits / 32] int32."""
    scale: "torch.Tensor"
    """[O, G]."""
    zero: "torch.Tensor | None"
    """[O, G] int32; None: the middle of the codes."""
    num_inputs: int

    @property
    def scheme(self) -> tuple[int, int, bool, bool]:
        """What its modules share with others of a group."""
        return self.bits, self.block, self.has_inputs_in_int8, self.zero is None


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export of ONNX Runtime GenAI."""
    return (folder / _SETTINGS_NAME).is_file() and (folder / GRAPH_NAME).is_file()


def exported_folder(folder: Path) -> Path | None:
    """Return the export that a folder was written from; None if it was not."""
    try:
        return Path(json.loads((folder / INFO_NAME).read_bytes())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checkpoint_of_export(export: Path, origin: Checkpoint, cache: Path) -> Path:
    """Return the folder with an export's weights as a quantised checkpoint, made first where `cache` lacks it.

    Raises:
        HarnessError: MISSING_PACKAGE (onnx); UNKNOWN_QUANTISATION: an operator is not read, or nothing is quantised;
            QUANTISED_MISFIT: a weight has no place in the checkpoint `origin` that the export was made from.
    """
    files = [*export.iterdir(), *(path for path in origin.folder.iterdir() if path.suffix in (".json", ".safetensors"))]
    stamps = [FileStamp.of(file) for file in sorted(files) if file.is_file()]
    folder = cache / json_digest([_VERSION, str(export), stamps])[:32]
    return made_once(folder, INFO_NAME, lambda made: _write(export, origin, made))


def _write(export: Path, origin: Checkpoint, made: Path) -> None:
    try:
        products = list(_products(export))
    except (OSError, KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
        _refuse("the export cannot be read", export / GRAPH_NAME, actual=f"{type(error).__name__}: {error}"[:200])
    if not products:
        what = "no weight of the export is in few bits"
        _refuse(what, export, actual="floats", hint=f"--model {origin.folder} --engine-option export={export}")
    weights = {module: product for each in products for module, product in _split(each, origin.config)}
    for module in weights:
        if f"{module}.weight" not in origin.tensors and module != "lm_head":
            raise HarnessError(
                Code.QUANTISED_MISFIT,
                "a weight of the export has no place in the checkpoint",
                where=f"{export / GRAPH_NAME}: {module}",
                expected=f"a module of {origin.folder}",
                hint="pass the checkpoint that the export was made from as --hf",
            )
    for file in origin.folder.iterdir():
        if file.suffix in (".json", ".model", ".txt", ".jinja") and not file.name.endswith(".index.json"):
            shutil.copy(file, made / file.name)
    config = {**origin.config, "quantization_config": _described(weights)}
    if "lm_head" in weights:
        config["tie_word_embeddings"] = False
    (made / CONFIG_NAME).write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_shards(made, _tensors(weights, origin))
    (made / INFO_NAME).write_text(json.dumps({"schema_version": 1, "source": str(export.resolve())}), encoding="utf-8")


def _products(export: Path) -> Iterator[_Product]:
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise missing_package("onnx", error, "pip install -e '.[onnxruntime]' in the harness's checkout") from error
    import torch

    try:
        model = onnx.load(export / GRAPH_NAME)
    except Exception as error:  # protobuf's own, which onnx does not name
        _refuse("the export cannot be read", export / GRAPH_NAME, actual=str(error)[:200])
    tensors = {each.name: each for each in model.graph.initializer}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(tensors[name]).copy())

    products: dict[str, _Product] = {}
    """By the name of their scales."""
    for node in model.graph.node:
        if node.op_type == _OPERATOR:
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            products[node.input[2]] = _product(node, attributes, read)
    for node in model.graph.node:
        given = [name for name in node.input if name in tensors]
        if node.op_type == _EMBEDDING and node.input[2] in products:  # the head's weight, read by the row
            head = products[node.input[2]]
            packed, scale = head.packed.clone(), head.scale.clone()  # a file holds no tensor twice
            products[node.name] = replace(
                head, module=_EMBEDDING_NAME, has_inputs_in_int8=False, packed=packed, scale=scale
            )
        elif node.op_type == _EMBEDDING or (
            node.op_type not in (_OPERATOR, "Reshape")
            and any(tensors[name].data_type in _codes(onnx) for name in given)
        ):
            _refuse("an operator with weights in few bits is not read", export, actual=node.op_type)
    yield from products.values()


def _codes(onnx: Any) -> set[int]:
    return {onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.UINT4, onnx.TensorProto.INT4}


def _product(node: Any, attributes: Mapping[str, Any], read: Any) -> _Product:
    import torch

    num_outputs, num_inputs, block = (int(attributes[name]) for name in ("N", "K", "block_size"))
    bits, others = int(attributes.get("bits", 4)), [name for name in node.input[3:] if name]
    codes, unknown = read(node.input[1]), sorted(set(attributes) - _ATTRIBUTES)
    if bits not in (4, 8) or num_inputs % block or codes.dtype != torch.uint8 or len(others) > 1 or unknown:
        what = "a product is not read"
        expected = f"{_OPERATOR} of 4 or 8 bits, whole blocks, and no more inputs than zero points"
        actual = f"{bits} bits, {num_inputs} inputs in blocks of {block}, codes in {codes.dtype}, {[*others, *unknown]}"
        _refuse(what, node.name, expected=expected, actual=actual)
    return _Product(
        module=node.name.strip("/").rpartition("/")[0].replace("/", ".").replace(".attn.", ".self_attn."),
        bits=bits,
        block=block,
        has_inputs_in_int8=int(attributes.get("accuracy_level", 0)) == _INT8,
        packed=codes.reshape(num_outputs, -1).contiguous().view(torch.int32),
        scale=read(node.input[2]).reshape(num_outputs, -1),
        zero=_zero_points(read(others[0]), node.name, bits, num_outputs, num_inputs // block) if others else None,
        num_inputs=num_inputs,
    )


def _zero_points(stored: "torch.Tensor", where: str, bits: int, num_outputs: int, num_blocks: int) -> "torch.Tensor":
    """Return [O, G] int32 of zero points, which are packed as the codes are, each output by itself."""
    import torch

    if stored.dtype != torch.uint8:
        _refuse("zero points that are no codes are not read", where, expected="uint8", actual=stored.dtype)
    rows = stored.reshape(num_outputs, -1).to(torch.int32)
    return (rows if bits == 8 else torch.stack((rows & 15, rows >> 4), dim=2).flatten(1))[:, :num_blocks]


def _split(product: _Product, config: Mapping[str, Any]) -> Iterator[tuple[str, _Product]]:
    """Yield HF's modules with their rows of a product."""
    if not product.module.endswith(_FUSED):
        yield product.module, product
        return
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    size = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    at, prefix = 0, product.module.removesuffix(_FUSED)
    for name, count in (("q_proj", num_heads), ("k_proj", num_kv_heads), ("v_proj", num_kv_heads)):
        rows = slice(at, at + count * size)
        yield prefix + name, _rows_of(product, rows)
        at = rows.stop


def _rows_of(product: _Product, rows: slice) -> _Product:
    zero = None if product.zero is None else product.zero[rows]
    return replace(product, packed=product.packed[rows], scale=product.scale[rows], zero=zero)


def _described(weights: Mapping[str, _Product]) -> dict[str, Any]:
    """Return the table `quantization_config`: a group for the modules that are quantised alike."""
    groups: dict[tuple[int, int, bool, bool], list[str]] = {}
    for module, product in weights.items():
        groups.setdefault(product.scheme, []).append(module)
    table = {}
    for at, ((bits, block, in_int8, is_symmetric), modules) in enumerate(groups.items()):
        shared = {"type": "int", "strategy": "group", "group_size": block}
        table[f"group_{at}"] = {
            "targets": modules,
            "weights": {"num_bits": bits, "symmetric": is_symmetric, **shared},
            "input_activations": {"num_bits": 8, "symmetric": True, "dynamic": True, **shared} if in_int8 else None,
        }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": table}


def _tensors(weights: Mapping[str, _Product], origin: Checkpoint) -> "Iterator[tuple[str, torch.Tensor]]":
    import torch
    from safetensors import safe_open

    for module, product in weights.items():
        yield f"{module}.weight_packed", product.packed
        yield f"{module}.weight_scale", product.scale
        yield f"{module}.weight_shape", torch.tensor([len(product.packed), product.num_inputs])
        if product.zero is not None:
            yield f"{module}.weight_zero_point", _words(product.zero, product.bits)
    for name, (_, path) in origin.tensors.items():
        if name.removesuffix(".weight") not in weights:
            with safe_open(path, framework="pt") as file:
                yield name, file.get_tensor(name)


def _words(zero: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Return zero points [O, G] in words of 32 bits along the outputs, as compressed-tensors has them."""
    import torch

    size = 32 // bits
    padded = torch.nn.functional.pad(zero, (0, 0, 0, -len(zero) % size)).to(torch.int64)
    shifted = padded.unflatten(0, (-1, size)) << (bits * torch.arange(size))[None, :, None]
    words: torch.Tensor = shifted.sum(dim=1)
    return words.to(torch.int32)  # words from the upper half become negative


def _refuse(what: str, where: object, **details: Any) -> NoReturn:
    details.setdefault("hint", "export it again with -p int4 -e cpu, or check the export in floats")
    raise HarnessError(Code.UNKNOWN_QUANTISATION, what, where=where, **details)
