"""In which precision the truth is, by what the engine recorded."""

from types import SimpleNamespace

import pytest
import torch

from harness.judge.compare.local import replay_dtype

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("choice", "taps", "dtype", "expected"),
    [
        ("auto", {"a": "BF16"}, torch.bfloat16, F32),
        ("auto", {"a": "BF16", "b": "F32"}, torch.bfloat16, F64),
        ("auto", {"a": "BF16", "lm_head": "F32", "head": "F32"}, torch.bfloat16, F32),
        ("auto", {"a": "F16"}, torch.float16, F32),
        ("auto", {"a": "F32"}, F32, F64),
        ("auto", {}, F32, F64),
        ("float32", {"a": "F32"}, torch.bfloat16, F32),
        ("float64", {"a": "BF16"}, torch.bfloat16, F64),
    ],
)
def test_the_precision_of_the_truth(choice, taps, dtype, expected):
    recording = SimpleNamespace(taps=[SimpleNamespace(name=name, dtype=kind) for name, kind in taps.items()])
    hf = SimpleNamespace(dtype=dtype, graph=SimpleNamespace(logits="lm_head", head=["head"]))
    assert replay_dtype(choice, recording, hf) is expected
