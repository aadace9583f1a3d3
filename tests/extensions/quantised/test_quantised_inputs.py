"""HuggingFace's model with inputs as a quantised checkpoint declares them, for as long as a block runs."""

import pytest
import torch

from harness.formats.checkpoint import resolve
from harness.oracle.declared_inputs import has_declared_inputs, inputs_as_declared
from harness.oracle.model import load_model
from tests.quantised_checkpoints import write_quantised

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def model(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))

    def load(kind):
        write_quantised(checkpoints / "qwen3-tiny", tmp_path / kind, kind)
        return load_model(resolve(str(tmp_path / kind)), dtype=torch.float32, stays=True)

    return load


@torch.no_grad()
def test_inputs_are_quantised_behind_the_hooks_and_put_back(model):
    hf = model("w8a8")
    module, seen = hf.module(UP), []
    x = torch.randn(2, 3, module.in_features, generator=torch.Generator().manual_seed(1))
    plain = module(x)
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    quantised = []

    def run_and_raise():
        with inputs_as_declared(hf, torch.float32):
            quantised.append(module(x))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_and_raise()
    handle.remove()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    torch.testing.assert_close(quantised[0], torch.nn.functional.linear((x / scale).round() * scale, module.weight))
    assert (quantised[0] - plain).norm() > 1e-3 * plain.norm()
    assert torch.equal(seen[0], x)
    assert torch.equal(module(x), plain)


@pytest.mark.parametrize(("kind", "is_declared"), [("w8a8", True), ("w4a16", False)])
def test_what_a_checkpoint_declares(model, kind, is_declared):
    assert has_declared_inputs(model(kind)) is is_declared


def test_a_checkpoint_in_floats_declares_nothing(checkpoints):
    assert not has_declared_inputs(load_model(checkpoints / "qwen3-tiny", dtype=torch.float32))
