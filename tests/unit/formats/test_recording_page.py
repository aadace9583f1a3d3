"""The producers on the format's page use nothing of the harness, and make recordings that it reads."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import Code
from harness.formats.recording import Manifest, Recording
from harness.formats.recording.manifest import ModelInfo, Producer, RequestInfo, StepEntry, TapEntry

PAGE = Path(__file__).parents[3] / "docs" / "recording-format.md"


def block(language):
    """Return the only code block of a language on the page."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return code


def check(folder, unverified):
    with Recording.open(folder) as recording:
        prefill, decode = recording.steps
        assert recording.manifest.producer.name == "example"
        assert recording.unverified == unverified
        assert (prefill.phase, decode.phase) == ("prefill", "decode")
        assert prefill.position.tolist() + decode.position.tolist() == [0, 1, 2]
        assert prefill.sampled.tolist() + decode.sampled.tolist() == [-1, 2, 1]
        assert prefill.rows_of("lm_head").tolist() == [1]
        assert decode.rows_of("lm_head") is None
        assert torch.equal(prefill.tap("model.embed_tokens"), torch.tensor([[0.5, 1.0], [-0.5, 2.0]]))
        assert torch.equal(decode.tap("lm_head"), torch.tensor([[0.1, 0.8, 0.3]]))


def test_the_python_producer(tmp_path):
    code = block("python")
    assert "harness" not in code
    subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path / "r")], check=True, timeout=600)
    check(tmp_path / "r", unverified=())


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the C++ producer")
def test_the_cpp_producer(tmp_path):
    (tmp_path / "producer.cpp").write_text(block("cpp"))
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "producer.cpp", "-o", "producer"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    subprocess.run([tmp_path / "producer", tmp_path / "r"], check=True, timeout=600)
    check(tmp_path / "r", unverified=("step-00000.safetensors", "step-00001.safetensors"))


@pytest.mark.parametrize("model", [Manifest, Producer, ModelInfo, RequestInfo, StepEntry, TapEntry])
def test_every_field_is_on_the_page(model):
    text = PAGE.read_text()
    names = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    assert set(model.model_fields) <= names


def test_every_code_is_the_one_on_the_page():
    codes = [
        Code.NOT_A_RECORDING, Code.BAD_MANIFEST, Code.UNKNOWN_SCHEMA, Code.STEP_MISSING, Code.STEP_TRUNCATED,
        Code.STEP_ALTERED, Code.STEP_MALFORMED,
    ]  # fmt: skip
    assert re.findall(r"^\| (H\d+) \|", PAGE.read_text(), flags=re.MULTILINE) == [str(code) for code in codes]
