"""A GGUF model held against the HuggingFace checkpoint that it was made from: metadata, vocabulary, every tensor.

A check of an engine cannot see a mistake of the converter: the truth has the same weights. So each tensor is compared
with the original, block by block, with what its type may lose; where it differs more, the known mistakes are tried.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import gguf_name, is_query_or_key
from harness.extensions.llamacpp.gguf.model import GGUFModel, rows_of_gguf, rows_of_hf
from harness.formats.checkpoint.checkpoint import Checkpoint, read_shard, read_table
from harness.formats.safetensors_header import TensorEntry

if TYPE_CHECKING:
    import torch

_BLOCK = 32
_LARGEST_ERROR = {
    "F32": 0.0, "BF16": 2.0**-8, "F16": 2.0**-11, "Q8_0": 0.02, "Q6_K": 0.06, "Q5_K": 0.12, "Q5_0": 0.12, "Q5_1": 0.12,
    "Q4_K": 0.22, "Q4_0": 0.25, "Q4_1": 0.22, "IQ4_NL": 0.22, "IQ4_XS": 0.25, "MXFP4": 0.35, "Q3_K": 0.45,
    "Q2_K": 0.75,
}  # fmt: skip
"""Largest relative L2 error of 32 weights: twice what was seen of normally distributed ones, blocks of 32."""
_OTHERS = 0.9
_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "dtype", "model_type", "transformers_version",  # names; the type is held apart
    "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type",  # of texts and labels
    "attention_dropout", "initializer_range", "pretraining_tp",  # of training
    "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict",
    "use_cache",  # of how HF runs it
    "max_position_embeddings",  # no position is computed otherwise by it
    "max_window_layers", "use_sliding_window",  # sliding_window and layer_types say it
    "tie_word_embeddings",  # the head's weights are compared
})  # fmt: skip
"""Fields of HF's configurations that do not change what the families compute."""
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""Fields that HF computes with, by the type of the rotary scaling."""
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    name: str
    cause: str
    expected: str
    actual: str


def read_original(model: GGUFModel, hf: Checkpoint) -> Any:
    """Return HF's configuration of the checkpoint that a file is said to be made from, with its defaults.

    Raises:
        HarnessError: GGUF_DIFFERS: the checkpoint is of another family.
    """
    from transformers import AutoConfig

    expected, actual = hf.config.get("model_type"), model.metadata.architecture
    if expected not in model.metadata.family.originals:
        cause = "the file is of another family"
        raise _error(
            model, _Difference(name="general.architecture", cause=cause, expected=str(expected), actual=actual)
        )
    return AutoConfig.for_model(**hf.config)


def check_against(
    model: GGUFModel,
    config: Mapping[str, Any],
    original: Any,
    hf: Checkpoint,
    tensors: "Iterable[tuple[str, torch.Tensor]]",
) -> None:
    """Hold a GGUF model against an HF checkpoint.

    `config` is the HF configuration that the file tells, `original` that of the checkpoint, from `read_original`. The
    tensors are dequantised, by HF's names and in HF's order.

    Raises:
        HarnessError: GGUF_DIFFERS, with the first difference and its cause.
    """
    differences = [
        *_configuration(model, config, original),
        *_vocabulary(model, hf.folder),
        *_tensors(model, hf, original, tensors),
    ]
    if differences:
        raise _error(model, *differences)


def _error(model: GGUFModel, first: _Difference, *more: _Difference) -> HarnessError:
    return HarnessError(
        Code.GGUF_DIFFERS,
        f"the GGUF file is not the model that it was made from: {first.cause}",
        where=f"{model.path}: {first.name}" + (f" (and {len(more)} more)" if more else ""),
        expected=first.expected,
        actual=first.actual,
        hint="convert the model again; without --hf the file is taken as it is",
    )


def _configuration(model: GGUFModel, config: Mapping[str, Any], original: Any) -> Iterator[_Difference]:
    """Compare everything in HF's configurations that changes what the model computes."""
    from transformers import AutoConfig

    ours, theirs = AutoConfig.for_model(**config), original
    actual, expected = _fields(ours), _fields(theirs)
    for name in sorted(actual.keys() | expected.keys()):
        if not _is_same(actual.get(name), expected.get(name)):
            is_base = name == "rope_theta"
            where = f"{model.metadata.architecture}.rope.freq_base" if is_base else name
            cause = "the rotary base differs" if is_base else f"{name} differs"
            yield _Difference(name=where, cause=cause, expected=str(expected.get(name)), actual=str(actual.get(name)))


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields that the class of a configuration declares, those of the rotary parameters among them."""
    values = config.to_dict()
    fields = {name: values[name] for name in type(config)().to_dict() if name not in _WITHOUT_EFFECT}
    rope = {
        **_ROPE_DEFAULTS,
        **{name: item for name, item in fields.pop("rope_parameters").items() if item is not None},
    }
    kind = rope.get("rope_type", "default")
    names = ("partial_rotary_factor", *_ROPE_FIELDS.get(kind, rope))
    scaling = {"rope_type": kind, **{name: rope[name] for name in names if name in rope}}
    return {**fields, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}


def _is_same(ours: Any, theirs: Any) -> bool:
    """Whether two values are the same number, or the same; what is off and what is not there are the same."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(_is_same(ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys())
    if isinstance(ours, float) or isinstance(theirs, float):
        both = (ours, theirs)
        return all(isinstance(item, int | float) for item in both) and math.isclose(*both, rel_tol=1e-6)
    return (ours or None) == (theirs or None)


def _vocabulary(model: GGUFModel, hf: Path) -> Iterator[_Difference]:
    """Compare the tokens that both have."""
    tokens = model.headers[0].metadata.get("tokenizer.ggml.tokens")
    path = hf / "tokenizer.json"
    if not isinstance(tokens, list) or not path.is_file():
        return
    vocabulary = read_table(path)[0].get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return
    for token, index in sorted(vocabulary.items(), key=lambda entry: int(entry[1])):
        if index < len(tokens) and tokens[index] != token:
            name, cause = f"tokenizer.ggml.tokens[{index}]", "the vocabularies disagree"
            yield _Difference(name=name, cause=cause, expected=repr(token), actual=repr(tokens[index]))
            return


def _tensors(
    model: GGUFModel, hf: Checkpoint, config: Any, tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> Iterator[_Difference]:
    originals = _Originals(hf.tensors, is_tied=bool(config.tie_word_embeddings))
    missing = set(originals.names)
    for name, source, values in _with_head(model, tensors):
        missing.discard(name)
        original = originals.get(name)
        kind = model.tensors[source][0].type.name
        if original is None:
            yield _Difference(name=name, cause="the checkpoint has no such tensor", expected="-", actual=name)
        elif original.shape != values.shape:
            cause, shapes = "a tensor has another shape", (str(list(original.shape)), str(list(values.shape)))
            yield _Difference(name=name, cause=cause, expected=shapes[0], actual=shapes[1])
        elif (bad := _bad_blocks(values, original, kind)) is not None:
            cause = _cause(name, values, kind, originals, bad, hf.config)
            largest = f"at most {_LARGEST_ERROR.get(kind, _OTHERS):.2g} of the weights, the format's own error"
            yield _Difference(name=name, cause=cause, expected=largest, actual=f"{bad.largest:.3g}")
    for name in sorted(missing):
        if gguf_name(name) is not None:
            yield _Difference(name=name, cause="a tensor is missing", expected=name, actual="-")


def _with_head(
    model: GGUFModel, tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> "Iterator[tuple[str, str, torch.Tensor]]":
    """Yield HF's name, the file's and the values of every tensor; the embedding is the head too where there is none."""
    for name, values in tensors:
        source = str(gguf_name(name))
        yield name, source, values
        if name == _EMBEDDING and "output.weight" not in model.tensors:
            yield _HEAD, source, values


class _Originals:
    """Tensors of the HF checkpoint, read when they are asked for."""

    def __init__(self, tensors: Mapping[str, tuple[TensorEntry, Path]], *, is_tied: bool) -> None:
        self._tensors = {**tensors, _HEAD: tensors[_EMBEDDING]} if is_tied and _EMBEDDING in tensors else tensors
        self._names = {_HEAD: _EMBEDDING} if is_tied else {}

    @property
    def names(self) -> Iterable[str]:
        return self._tensors

    def get(self, name: str) -> "torch.Tensor | None":
        """Return a tensor in float32; None if there is none."""
        if name not in self._tensors:
            return None
        return read_shard(self._tensors[name][1], self._names.get(name, name)).float()


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of 32 weights that differ by more than their type may lose."""

    indices: "torch.Tensor"
    num_blocks: int
    largest: float


def _bad_blocks(values: "torch.Tensor", original: "torch.Tensor", kind: str) -> _Blocks | None:
    """Return the blocks that differ; None if all are as near as the type permits."""
    ours, theirs = _blocked(values), _blocked(original)
    norms = theirs.norm(dim=1)
    error = (ours - theirs).norm(dim=1)
    limit = _LARGEST_ERROR.get(kind, _OTHERS)
    # What is small beside its neighbours may be rounded to nothing: a K-quant's scales are shared by 256 weights.
    typical = norms.square().mean().sqrt() * (limit / 4 if kind not in ("F32", "F16", "BF16") else 2.0**-14)
    room = limit * norms + (typical if limit else 0.0)
    bad = (error > room) | ~error.isfinite()
    if not bool(bad.any()):
        return None
    relative = (error / norms.clamp(min=1e-30))[bad]
    return _Blocks(bad.nonzero()[:, 0], len(bad), float(relative.nan_to_num(nan=math.inf).max()))


def _blocked(values: "torch.Tensor") -> "torch.Tensor":
    """[blocks, 32] of a tensor; the last block of a row that is no multiple of 32 is filled with zeros."""
    from torch.nn.functional import pad

    rows = values.float().reshape(-1, values.shape[-1])
    return pad(rows, (0, -rows.shape[-1] % _BLOCK)).reshape(-1, _BLOCK)


def _cause(
    name: str, values: "torch.Tensor", kind: str, originals: _Originals, bad: _Blocks, config: Mapping[str, Any]
) -> str:
    """Say what was done to a tensor that differs if it is one of the known mistakes."""
    original = originals.get(name)
    assert original is not None
    if is_query_or_key(name):
        heads = config["num_attention_heads"]
        heads = config.get("num_key_value_heads") or heads if ".k_proj." in name else heads
        for turned, cause in (
            (
                rows_of_gguf(values, heads),
                "the rows of its heads were not put in the order of interleaved rotary pairs",
            ),
            (rows_of_hf(values, heads), "the rows of its heads were reordered twice"),
        ):
            if _bad_blocks(turned, original, kind) is None:
                return cause
    for rival in originals.names:
        candidate = originals.get(rival) if rival != name else None
        if (
            candidate is not None
            and candidate.shape == values.shape
            and _bad_blocks(values, candidate, kind) is None
            and _bad_blocks(candidate, original, kind) is not None
        ):
            return f"it holds the weights of {rival}"
    if values.ndim == 2 and values.shape[0] == values.shape[1] and _bad_blocks(values.T, original, kind) is None:
        return "it is transposed"
    return _cause_of_blocks(values, original, kind, bad)


def _cause_of_blocks(values: "torch.Tensor", original: "torch.Tensor", kind: str, bad: _Blocks) -> str:
    """Tell a wrong scale from wrong weights, for the blocks that differ."""
    ours, theirs = _blocked(values)[bad.indices], _blocked(original)[bad.indices]
    gain = (ours * theirs).sum(dim=1) / theirs.square().sum(dim=1).clamp(min=1e-30)
    rescaled = (ours / gain[:, None] - theirs).norm(dim=1) <= 2 * _LARGEST_ERROR.get(kind, _OTHERS) * theirs.norm(dim=1)
    blocks = f"{len(bad.indices)} of {bad.num_blocks} blocks of {_BLOCK} weights"
    if (
        len(bad.indices) == bad.num_blocks
        and bool(rescaled.all())
        and float(gain.std(correction=0)) < 0.05 * float(gain.mean())
    ):
        return f"all weights are scaled by {float(gain.mean()):.4g}"
    if not bool(rescaled.all()):
        return f"{blocks} hold other weights, the first block {int(bad.indices[0])}"
    largest = _blocked(original).abs().amax(dim=1)
    for shift, neighbour in ((-1, "the one before it"), (1, "the next one")):
        source = (bad.indices + shift).clamp(0, bad.num_blocks - 1)
        wanted = largest[source] / largest[bad.indices].clamp(min=1e-30)
        if bool(((gain.abs() - wanted).abs() <= 0.15 * wanted).all()):  # a scale has the sign of the largest weight
            return f"{blocks} have the scale of {neighbour}, the first block {int(bad.indices[0])}"
    return f"{blocks} have a wrong scale, the first block {int(bad.indices[0])} by {float(gain[0]):.4g}"
