"""Altered files: what is accepted computes what llama.cpp computes of it; with `--hf`, what the original computes."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import HarnessError
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.formats import checkpoint
from harness.oracle.model import load_model

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
from .llama_cpp import RefusedError, logits  # noqa: E402
from .test_architecture import keys  # noqa: E402

NAMES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
IDS = [1, 64, 155, 143, 3, 64, 20, 7, 90, 91, 92, 12]
KEYS = sorted({*keys(), "rope.scale_linear"})
VALUES = (
    1,
    2,
    3,
    8,
    16,
    32,
    0.0,
    0.5,
    1.0,
    2.0,
    4.0,
    0.25,
    1e4,
    5e5,
    True,
    False,
    "none",
    "linear",
    "yarn",
    "longrope",
)
LIKELY = ("rope.scaling.type", "rope.scaling.factor", "rope.freq_base", "rope.scaling.original_context_length",
          "rope.dimension_count", "attention.key_length", "attention.value_length", "rope.scale_linear")  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def altered(draw, tensors):
    """Draw settings and tensors in the place of a sound file's; no scale so small that angles have no digits left."""
    keys = [draw.choice([*KEYS, *LIKELY * 8]) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    metadata = {key: draw.choice((*VALUES, None)) for key in keys}
    if metadata.get("rope.freq_base") in (0.25, 0.5):
        metadata["rope.freq_base"] = 2e4
    extra = {}
    for _ in range(draw.choice([0, 0, 1, 2]) if metadata else 1):
        name = draw.choice(sorted(tensors))
        values = tensors[name]
        kind = draw.choice(["scale", "flip", "swap", "remove", "bias", "freqs", "head", "alias", "other"])
        if kind == "scale":
            extra[name] = values * draw.choice([1.01, 2.0, -1.0])
        elif kind == "flip":
            extra[name] = values.flip(0)
        elif kind == "swap":
            extra[name] = tensors[
                draw.choice(sorted(tensor for tensor in tensors if tensors[tensor].shape == values.shape))
            ]
        elif kind == "remove":
            extra[name] = None
        elif kind == "bias":
            extra[name.replace(".weight", ".bias")] = torch.full((values.shape[0],), 0.5)
        elif kind == "freqs":
            extra["rope_freqs.weight"] = draw.choice(
                [None, *(torch.full((count,), by) for count in (8, 16) for by in (1.0, 8.0))]
            )
        elif kind == "head":
            extra["output.weight"] = draw.choice(
                [tensors["token_embd.weight"], tensors["token_embd.weight"].flip(0), None]
            )
        else:
            new_name = name.replace("blk.", "blk.0") if kind == "alias" else name.replace("blk.0", "blk.7") + "s"
            extra[new_name] = values.flip(0)
    return metadata, extra


def harness_logits(path, hf=None):
    """Return the truth's logits in float64, or None where the file is refused."""
    try:
        model = load_model(checkpoint.resolve(str(path), hf=None if hf is None else str(hf)), dtype=torch.float64)
    except HarnessError:
        return None
    return model.run(input_ids=torch.tensor([IDS])).logits[0].double()


@pytest.mark.parametrize("name", NAMES)
def test_the_reading_that_it_is_held_against_is_that_of_a_sound_file(name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf")
    original = AutoModelForCausalLM.from_pretrained(checkpoints / name, dtype=torch.float64)
    with torch.no_grad():
        expected = original(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(path, IDS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", range(3))
def test_altered_files(name, batch, checkpoints, tmp_path):
    hf, draw = checkpoints / name, random.Random(f"{name}{batch}")
    sound = write_gguf(hf, tmp_path / "sound.gguf")
    original = logits(sound, IDS)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(sound).tensors}
    for at in range(12):
        metadata, extra = altered(draw, tensors)
        path = write_gguf(hf, tmp_path / f"{at}.gguf", metadata=metadata, extra=extra)
        with_hf, alone = harness_logits(path, hf), harness_logits(path)
        for reading in (with_hf, alone):
            if reading is None:
                continue
            try:
                expected = logits(path, IDS)
            except (RefusedError, TypeError):
                expected = None  # llama.cpp says so itself
            if expected is not None:
                told = f"{metadata} {sorted(extra)} "
                torch.testing.assert_close(
                    reading, expected, rtol=1e-4, atol=1e-4, msg=lambda text, told=told: told + text
                )
            if reading is with_hf:
                assert torch.allclose(reading, original, rtol=1e-4, atol=1e-4), (metadata, sorted(extra))
