"""What `quantization_config` says of each module: every field is one that is understood, or the checkpoint is refused.

A field that is not in these tables may change what the stored numbers mean. Fields that only tell how the quantiser
worked (its damping, its calibration) are listed as free. Nothing here imports torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from harness.errors import Code, HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScheme:
    """How the inputs of a product are quantised before it."""

    dtype: str
    """`int8`, `float8_e4m3fn` or `float4_e2m1`."""
    share: str
    """What shares a scale: `token`, `tensor` or `group`."""
    group: int | None = None
    """Inputs of a group."""
    is_static: bool = False
    """Whether the scale is in the checkpoint; else it is that of the values at hand."""

    rounded_to: str | None = None
    """A dtype that the inputs are rounded to before they are quantised."""

    def __str__(self) -> str:
        """Say it as the report does: `int8, one scale for a token`."""
        where = ", read from the checkpoint" if self.is_static else ""
        what = f"{self.group} inputs" if self.share == "group" else f"a {self.share}"
        return f"{self.dtype}, one scale for {what}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one module is quantised."""

    format: str
    """A key of `FORMATS`."""
    bits: int = 8
    strategy: str = "channel"
    """What shares a scale: `tensor`, `channel`, `group` or `block`."""
    group: int | None = None
    """Inputs of a group."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block."""
    is_symmetric: bool = True
    is_ordered: bool = False
    """Whether inputs were sorted by their activations."""
    zero_offset: int = 0
    """What is added to a stored zero point."""
    has_middle_zero: bool = False
    """Whether the checkpoint says that the middle of the codes is the zero point, beside zero points that it has."""
    inputs: InputScheme | None = None
    """None where inputs stay as they are, or nothing is said of them."""


def refuse(what: str, where: object, **details: Any) -> NoReturn:
    """Raise UNKNOWN_QUANTISATION."""
    hint = "docs/quantised-checkpoints.md lists what is read; or pass the model that this one was quantised from"
    raise HarnessError(Code.UNKNOWN_QUANTISATION, what, where=where, hint=hint, **details)


def misfit(what: str, where: object, **details: Any) -> NoReturn:
    """Raise QUANTISED_MISFIT."""
    hint = "download the checkpoint again, or write it with a current version of its quantiser"
    raise HarnessError(Code.QUANTISED_MISFIT, what, where=where, hint=hint, **details)


def one_of(value: object, allowed: Sequence[object], where: object) -> None:
    """Refuse a value of a field that is not understood."""
    if not any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in allowed):
        refuse("the value is not understood", where, expected=", ".join(map(str, allowed)), actual=value)


_T = TypeVar("_T")
FREE = None
"""Of a field whose value does not change what the stored numbers mean."""
Fields = Mapping[str, Sequence[Any] | None]
_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
_NO: Sequence[Any] = (None, False, [], {}, "")
_COMMON: Fields = {"quant_method": FREE}
_SKIPS = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "ignore")
"""Fields that name modules which are not quantised."""
_GPTQ: Fields = {
    **_COMMON, "bits": (2, 4, 8), "group_size": _GROUPS, "desc_act": (True, False), "sym": (True, False),
    "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",),
    "lm_head": (True, False), "dynamic": _NO, "is_marlin_format": _NO, "static_groups": FREE, "damp_percent": FREE,
    "damp_auto_increment": FREE, "true_sequential": FREE, "meta": FREE, "quantizer": FREE, "dataset": FREE,
    "tokenizer": FREE, "block_name_to_quantize": FREE, "module_name_preceding_first_block": FREE, "batch_size": FREE,
    "pad_token_id": FREE, "max_input_length": FREE, "cache_block_outputs": FREE, "use_cuda_fp16": FREE,
    "use_exllama": FREE, "disable_exllama": FREE, "exllama_config": FREE, "backend": FREE, "model_seqlen": FREE,
    "modules_in_block_to_quantize": FREE, "model_name_or_path": FREE, "model_file_base_name": FREE, "mse": FREE,
    "act_group_aware": FREE, "quant_dtype": ("int",),
}  # fmt: skip
_AWQ: Fields = {
    **_COMMON, "bits": (4,), "w_bit": (4,), "group_size": _GROUPS, "q_group_size": _GROUPS,
    "zero_point": (True, False), "version": ("gemm", "GEMM"), "format": ("gemm", "GEMM"),
    "modules_to_not_convert": FREE, "backend": FREE, "do_fuse": FREE, "fuse_max_seq_len": FREE,
    "modules_to_fuse": FREE, "exllama_config": FREE, "sym": FREE, "desc_act": _NO,
}  # fmt: skip
_FP8: Fields = {
    **_COMMON, "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3", "float8_e4m3fn"), "weight_block_size": FREE,
    "modules_to_not_convert": FREE, "ignored_layers": FREE, "scale_fmt": ("float", "ue8m0", None), "dequantize": _NO,
    "modules_to_convert": _NO, "expert_dtype": ("fp8",), "kv_cache_scheme": _NO,
}  # fmt: skip
_BITSANDBYTES: Fields = {
    **_COMMON, "load_in_4bit": (True, False), "load_in_8bit": (True, False), "_load_in_4bit": (True, False),
    "_load_in_8bit": (True, False), "bnb_4bit_quant_type": ("nf4", "fp4"), "bnb_4bit_use_double_quant": (True, False),
    "bnb_4bit_compute_dtype": FREE, "bnb_4bit_quant_storage": ("uint8", "bfloat16", "float16", "float32"),
    "llm_int8_threshold": FREE, "llm_int8_skip_modules": FREE, "llm_int8_enable_fp32_cpu_offload": FREE,
    "llm_int8_has_fp16_weight": _NO,
}  # fmt: skip
_MXFP4: Fields = {**_COMMON, "modules_to_not_convert": FREE, "dequantize": _NO}
_TORCHAO: Fields = {
    **_COMMON, "quant_type": FREE, "modules_to_not_convert": FREE, "include_input_output_embeddings": (True, False),
    "untie_embedding_weights": (True, False), "quant_type_kwargs": _NO,
}  # fmt: skip
_COMPRESSED: Fields = {
    **_COMMON, "config_groups": FREE, "format": FREE, "ignore": FREE, "quantization_status": ("compressed",),
    "global_compression_ratio": FREE, "kv_cache_scheme": FREE, "version": FREE, "sparsity_config": _NO,
    "transform_config": _NO, "moe_sparsity_config": _NO, "dequantize": _NO, "run_compressed": FREE,
    "use_optimized_inference": FREE,
}  # fmt: skip
_COMPRESSED_GROUP: Fields = {
    "targets": FREE, "weights": FREE, "input_activations": FREE, "output_activations": (None,), "format": FREE,
}  # fmt: skip
_COMPRESSED_ARGUMENTS: Fields = {
    "num_bits": (4, 8), "type": ("int", "float"), "symmetric": (True, False), "group_size": (None, *_GROUPS),
    "strategy": ("tensor", "channel", "group", "block", "token", "tensor_group"), "block_structure": FREE,
    "dynamic": (True, False, "local"), "actorder": (None, False, "static", "weight", "group", "dynamic"),
    "observer": FREE, "observer_kwargs": FREE, "scale_dtype": FREE, "zp_dtype": FREE,
}  # fmt: skip
_WHOLE, _GROUPED = ("tensor", "channel", "group", "block"), ("group",)
_PACKINGS: Mapping[str, Mapping[tuple[int, str], tuple[str, Sequence[str]]]] = {
    "int-quantized": {(8, "int"): ("compressed-int8", _WHOLE)},
    "float-quantized": {(8, "float"): ("compressed-float8", _WHOLE)},
    "naive-quantized": {(8, "int"): ("compressed-int8", _WHOLE), (8, "float"): ("compressed-float8", _WHOLE)},
    "pack-quantized": dict.fromkeys(((4, "int"), (8, "int")), ("compressed-packed", ("channel", "group"))),
    "nvfp4-pack-quantized": {(4, "float"): ("compressed-nvfp4", ("group", "tensor_group"))},
    "mxfp4-pack-quantized": {(4, "float"): ("compressed-mxfp4", _GROUPED)},
}
"""By compressed-tensors' name of a packing, then by bits and type of codes: the format, and what may share a scale."""
_INPUTS = {(8, "int"): "int8", (8, "float"): "float8_e4m3fn", (4, "float"): "float4_e2m1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """What a checkpoint says of its modules."""

    method: str
    default: Scheme | None
    """Of the modules that no target names; None where the KV cache alone is quantised."""
    targets: tuple[tuple[str, Scheme], ...] = ()
    """Names or patterns of modules, and how these are quantised; the first that fits counts."""
    left_out: tuple[str, ...] = ()
    """Names or patterns of modules that are not quantised."""

    @property
    def all(self) -> tuple[Scheme, ...]:
        """Every scheme that occurs."""
        every = (*(scheme for _, scheme in self.targets), self.default)
        return tuple(dict.fromkeys(scheme for scheme in every if scheme is not None))

    def of(self, module: str) -> Scheme:
        """Return how a module is quantised, given that it is."""
        scheme = next((scheme for target, scheme in self.targets if _names(target, module)), self.default)
        assert scheme is not None
        return scheme

    def leaves_out(self, module: str) -> bool:
        """Whether the checkpoint says that a module is not quantised."""
        return any(_names(pattern, module) for pattern in self.left_out)


def _names(pattern: str, module: str) -> bool:
    """Whether a name or a pattern `re:...` is of a module: of all of its path, or of some parts of that."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def read_schemes(config: Mapping[str, Any], where: str) -> Schemes:
    """Return what a table `quantization_config` says.

    Raises:
        HarnessError: UNKNOWN_QUANTISATION: a method, a field or a value is not understood.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        refuse("the quantisation is not known", f"{where}.quant_method", expected=", ".join(_METHODS), actual=method)
    fields, read = _METHODS[method]
    _check(config, fields, where)
    skipped = [config.get(field) for field in _SKIPS]
    schemes = read(config, where)
    left_out = tuple(str(name) for names in skipped if isinstance(names, list) for name in names)
    for pattern in (*left_out, *(target for target, _ in schemes)):
        _check_pattern(pattern, where)
    default = schemes[0][1] if schemes else None
    return Schemes(method=method, default=default, targets=tuple(schemes[1:]), left_out=left_out)


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        refuse(f"a pattern of modules is no regular expression: {error}", where, actual=pattern)


def _check(table: Mapping[str, Any], fields: Fields, where: str) -> None:
    for name, value in table.items():
        if name not in fields:
            refuse("the field is not understood", f"{where}.{name}", actual=str(value)[:100])
        if (allowed := fields[name]) is not None:
            one_of(value, allowed, f"{where}.{name}")


Targets = list[tuple[str, Scheme]]


def _gptq(config: Mapping[str, Any], where: str) -> Targets:
    is_v2 = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
    _require(config, ("bits", "group_size"), where)
    return [("", Scheme(
        format="gptq", bits=config["bits"], strategy="group", group=config["group_size"],
        is_symmetric=False, is_ordered=bool(config.get("desc_act")), zero_offset=0 if is_v2 else 1,
        has_middle_zero=config.get("sym") is True,
    ))]  # fmt: skip


def _awq(config: Mapping[str, Any], where: str) -> Targets:
    group = config.get("group_size", config.get("q_group_size"))
    one_of(group, _GROUPS, f"{where}.group_size")
    return [("", Scheme(format="awq", bits=4, strategy="group", group=group, is_symmetric=False))]


def _fp8(config: Mapping[str, Any], where: str) -> Targets:
    size, is_static = config.get("weight_block_size"), config.get("activation_scheme") == "static"
    if size is None:
        inputs = InputScheme(dtype="float8_e4m3fn", share="tensor", is_static=is_static)
        return [("", Scheme(format="fp8", strategy="tensor", inputs=inputs))]
    block = _block(size, f"{where}.weight_block_size")
    inputs = InputScheme(dtype="float8_e4m3fn", share="group", group=block[1], is_static=is_static)
    return [("", Scheme(format="fp8-block", strategy="block", block=block, inputs=inputs))]


def _block(size: object, where: str) -> tuple[int, int]:
    if not (isinstance(size, list) and len(size) == 2 and all(type(item) is int and item > 0 for item in size)):
        refuse("the size of a block is not two numbers", where, expected="[128, 128]", actual=size)
    return size[0], size[1]


def _bitsandbytes(config: Mapping[str, Any], where: str) -> Targets:
    is_4bit = config.get("load_in_4bit", config.get("_load_in_4bit", False))
    is_8bit = config.get("load_in_8bit", config.get("_load_in_8bit", False))
    if is_4bit is is_8bit:
        refuse("it is not said whether weights have 4 bits or 8", f"{where}.load_in_4bit", expected="one of the two")
    if is_8bit:
        inputs = InputScheme(dtype="int8", share="token", rounded_to="float16")
        return [("", Scheme(format="bnb-int8", strategy="channel", inputs=inputs))]
    return [("", Scheme(format="bnb-4bit", bits=4, strategy="group"))]


def _mxfp4(_config: Mapping[str, Any], _where: str) -> Targets:
    return [("", Scheme(format="gpt-oss-mxfp4", bits=4, strategy="group", group=32))]


def _torchao(config: Mapping[str, Any], where: str) -> Targets:
    kind = (config.get("quant_type") or {}).get("default") if isinstance(config.get("quant_type"), dict) else None
    name = kind.get("_type") if isinstance(kind, dict) else config.get("quant_type")
    one_of(name, ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"), f"{where}.quant_type")
    inputs = InputScheme(dtype="int8", share="token") if "Dynamic" in str(name) else None
    return [("", Scheme(format="torchao-int8", strategy="channel", inputs=inputs))]


def _require(config: Mapping[str, Any], fields: Sequence[str], where: str) -> None:
    for field in fields:
        if field not in config:
            refuse(f"the field {field} is missing", where, actual=", ".join(config))


def _compressed(config: Mapping[str, Any], where: str) -> Targets:
    groups = config.get("config_groups")
    if groups == {} and isinstance(config.get("kv_cache_scheme"), dict):
        return []
    if not isinstance(groups, dict) or not groups:
        refuse("there are no groups of modules", f"{where}.config_groups", expected="a table", actual=groups)
    schemes: Targets = []
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not targets or not all(isinstance(item, str) for item in targets):
            refuse("the group names no modules", at, expected="a table with targets", actual=str(group)[:100])
        _check(group, _COMPRESSED_GROUP, at)
        scheme = _compressed_scheme(group, group.get("format") or config.get("format"), at)
        schemes += [(target, scheme) for target in targets]
    classes = [pair for pair in schemes if pair[0] in ("Linear", "Embedding")]
    if len({scheme for _, scheme in classes}) > 1:
        refuse("several groups name the same class of modules", f"{where}.config_groups", actual=len(groups))
    return [*(classes or schemes)[:1], *(pair for pair in schemes if pair not in classes)]


def _compressed_scheme(group: Mapping[str, Any], packing: object, where: str) -> Scheme:
    one_of(packing, tuple(_PACKINGS), f"{where}.format")
    weights, at = group.get("weights"), f"{where}.weights"
    if not isinstance(weights, dict):
        refuse("nothing is said of the weights", at, expected="a table", actual=weights)
    _check(weights, _COMPRESSED_ARGUMENTS, at)
    _require(weights, ("num_bits", "type", "strategy"), at)
    format, strategies = _of_codes(_PACKINGS[str(packing)], weights, at)
    strategy, is_ordered = weights["strategy"], weights.get("actorder") in ("group", "dynamic")
    one_of(strategy, _GROUPED if is_ordered else strategies, f"{at}.strategy")
    one_of(weights.get("symmetric", True), (True,) if weights["type"] == "float" else (True, False), f"{at}.symmetric")
    is_grouped = strategy in ("group", "tensor_group")
    return Scheme(
        format=format,
        bits=weights["num_bits"],
        strategy="group" if is_grouped else strategy,
        group=_group_size(weights, at) if is_grouped else None,
        block=_block(weights.get("block_structure"), at) if strategy == "block" else None,
        is_symmetric=weights.get("symmetric", True),
        is_ordered=is_ordered,
        inputs=_compressed_inputs(group.get("input_activations"), f"{where}.input_activations"),
    )


def _compressed_inputs(table: object, where: str) -> InputScheme | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        refuse("the inputs' quantisation is not a table", where, actual=table)
    _check(table, _COMPRESSED_ARGUMENTS, where)
    _require(table, ("num_bits", "type", "strategy"), where)
    one_of(table.get("symmetric", True), (True,), f"{where}.symmetric")
    one_of(table["strategy"], ("token", "tensor", "group", "tensor_group"), f"{where}.strategy")
    is_grouped = table["strategy"] in ("group", "tensor_group")
    return InputScheme(
        dtype=_of_codes(_INPUTS, table, where),
        share="group" if is_grouped else table["strategy"],
        group=_group_size(table, where) if is_grouped else None,
        is_static=table.get("dynamic") in (False, None),
    )


def _of_codes(known: Mapping[tuple[int, str], _T], arguments: Mapping[str, Any], where: str) -> _T:
    """Return what belongs to codes of some bits and type."""
    bits, kind = arguments["num_bits"], arguments["type"]
    if (bits, kind) not in known:
        expected = " or ".join(f"{bits} bits of {kind}" for bits, kind in known)
        refuse("the codes are not understood here", f"{where}: num_bits, type", expected=expected, actual=f"{bits} bits of {kind}")  # fmt: skip  # noqa: E501
    return known[bits, kind]


def _group_size(arguments: Mapping[str, Any], where: str) -> int:
    size = arguments.get("group_size")
    if not isinstance(size, int) or size < 1:
        refuse("the size of a group is missing", f"{where}.group_size", expected="a number", actual=size)
    return size


_METHODS: Mapping[str, tuple[Fields, Callable[[Mapping[str, Any], str], Targets]]] = {
    "compressed-tensors": (_COMPRESSED, _compressed),
    "fp8": (_FP8, _fp8),
    "gptq": (_GPTQ, _gptq),
    "awq": (_AWQ, _awq),
    "bitsandbytes": (_BITSANDBYTES, _bitsandbytes),
    "mxfp4": (_MXFP4, _mxfp4),
    "torchao": (_TORCHAO, _torchao),
}
