"""The model that is timed: of a published size with seeded random weights, or a checkpoint of the user's.

Speed depends on shapes, so no download is needed. The shapes are of Qwen3's architecture, which every peer knows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn.functional import pad
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.errors import Code, HarnessError
from harness.extensions.bench.peer import UnevenSize
from harness.extensions.estimate.meta_model import read_config
from harness.formats.checkpoint import Checkpoint

WEIGHT_STD = 0.02
FLOAT8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the work of a model depends on."""

    hidden_size: int
    vocab_size: int
    prompt_len: int
    """Tokens of each prompt where prefill and decode are timed."""
    decode_len: int
    """Tokens generated there."""
    uneven: UnevenSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Sizes):
    """The sizes of a model, and how much work it gets."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    is_tied: bool

    def config(self) -> Qwen3Config:
        """Return the config.json, with room for the longest request."""
        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.ffn_size,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=40960,
            architectures=["Qwen3ForCausalLM"],
            bos_token_id=None,
            eos_token_id=None,
        )

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


SHAPES = {
    "tiny": Shape(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128, vocab_size=512,
        is_tied=True, prompt_len=16, decode_len=4,
        uneven=UnevenSize(num_requests=5, prompt_lens=(4, 24), output_lens=(2, 9)),
    ),
    "142m": Shape(
        hidden_size=768, num_layers=12, num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=2304, vocab_size=65536,
        is_tied=True, prompt_len=128, decode_len=32,
        uneven=UnevenSize(num_requests=16, prompt_lens=(16, 128), output_lens=(8, 64)),
    ),
    "qwen3-0.6b": Shape(
        hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=3072, vocab_size=151936,
        is_tied=True, prompt_len=128, decode_len=64,
        uneven=UnevenSize(num_requests=256, prompt_lens=(100, 1024), output_lens=(100, 1024)),
    ),
    "qwen3-8b": Shape(
        hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=12288, vocab_size=151936,
        is_tied=False, prompt_len=128, decode_len=64,
        uneven=UnevenSize(num_requests=64, prompt_lens=(100, 512), output_lens=(100, 512)),
    ),
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """Return a shape by name.

    Raises:
        HarnessError: BAD_OPTION.
    """
    if name not in SHAPES:
        raise HarnessError(Code.BAD_OPTION, "unknown shape", where="--shape", expected=", ".join(SHAPES), actual=name)
    return SHAPES[name]


def sizes_of(checkpoint: Checkpoint) -> Sizes:
    """Return the sizes of a checkpoint, with as much work as the shape `142m` has, within its context.

    Raises:
        HarnessError: BAD_CONFIG: it is no decoder that transformers knows.
    """
    config = read_config(str(checkpoint.folder)).get_text_config()
    usual = SHAPES["142m"]
    (shortest, longest), outputs = usual.uneven.prompt_lens, usual.uneven.output_lens
    context = getattr(config, "max_position_embeddings", None) or usual.prompt_len + outputs[1]
    most = min(longest, context * 2 // 3)
    return Sizes(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        prompt_len=most,
        decode_len=min(usual.decode_len, context // 4),
        uneven=UnevenSize(
            num_requests=usual.uneven.num_requests,
            prompt_lens=(min(shortest, most), most),
            output_lens=(min(outputs[0], context // 4), min(outputs[1], context // 4)),
        ),
    )


def build_checkpoint(shape: Shape, folder: Path, *, dtype: str, seed: int, device: str) -> int:
    """Write a checkpoint with random weights, the same ones for a seed on a device, and return how many there are.

    Norms are 1; every other weight is normal with the standard deviation that transformers initialises with.
    """
    config, torch_dtype = shape.config(), getattr(torch, dtype)
    config.dtype = torch_dtype
    with torch.device("meta"):
        parameters: dict[str, Any] = dict(Qwen3ForCausalLM(config).named_parameters())  # a tied head comes once
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {name: _random(name, meta.shape, torch_dtype, generator) for name, meta in parameters.items()}
    config.save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(meta.numel() for meta in parameters.values())


def quantise_checkpoint(folder: Path, target: Path) -> None:
    """Write the matrices of the layers in float8 to `target`, and give the checkpoint the same values.

    They are in DeepSeek's form, `fp8`: each block of 128 outputs and inputs has a scale.
    """
    rounded = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = dict(rounded)
    for name, weight in rounded.items():
        if ".layers." in name and weight.ndim == 2:
            tensors[name], tensors[f"{name}_scale_inv"], rounded[name] = _in_float8(weight)
    for place, values in ((folder, rounded), (target, tensors)):
        config = Qwen3Config.from_pretrained(folder)
        if place == target:
            config.quantization_config = {
                "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FLOAT8_BLOCK] * 2,
            }  # fmt: skip
        config.save_pretrained(place)
        safetensors.torch.save_file(values, place / "model.safetensors", metadata={"format": "pt"})


def _in_float8(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [O, I], float32 scales [blocks, blocks], and what they stand for, [O, I] in the weight's dtype."""
    num_outputs, num_inputs = weight_OI.shape
    padding = (0, -num_inputs % FLOAT8_BLOCK, 0, -num_outputs % FLOAT8_BLOCK)
    blocks = pad(weight_OI.float(), padding).unflatten(0, (-1, FLOAT8_BLOCK)).unflatten(2, (-1, FLOAT8_BLOCK))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    spread = scale[:, None, :, None]
    codes = (blocks / spread).to(torch.float8_e4m3fn)
    parts = (codes.view(torch.uint8), (codes.float() * spread).to(weight_OI.dtype))
    code_OI, rounded_OI = (x.flatten(2).flatten(0, 1)[:num_outputs, :num_inputs].contiguous() for x in parts)
    return code_OI.view(torch.float8_e4m3fn), scale, rounded_OI


def _random(name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    weight = torch.empty(shape, dtype=dtype, device=generator.device)
    return weight.normal_(0.0, WEIGHT_STD, generator=generator).cpu()
