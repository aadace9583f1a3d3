"""The first wrong operation by itself: its script shows the error without the harness."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import harness
from harness.engines.by_content import StepEngine
from tests.examples import fused_engine as fused

PROMPT = [5, 9, 14, 3, 8, 21, 4, 17, 6]
AT = 4


def changed(module, change):
    forward = module.forward
    module.forward = lambda *arguments: change(forward, *arguments)


def from_row(x, wrong):
    """Return `wrong` from one row on."""
    return torch.where((torch.arange(len(x)) >= AT)[:, None], wrong, x)


def gelu(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


MISTAKES = {
    "mlp.down_proj": lambda layer: changed(layer.down_proj, lambda product, x: product(from_row(x, x * 1.5))),
    "post_attention_layernorm": lambda layer: setattr(layer.post_attention_layernorm, "eps", 0.5),
    "q_rope": lambda layer: setattr(layer, "rotary", WrongRotary(layer.rotary)),
    "attention": lambda layer: changed(layer.attn, lambda attend, q, *others: attend(from_row(q, q * 1.2), *others)),
    "mlp.act": lambda layer: setattr(layer.act, "forward", gelu),
}
FIRST = {"mlp.down_proj": AT, "q_rope": AT, "attention": AT}
"""First wrong row by site; the first one of all if absent."""


class WrongRotary(fused.Rotary):
    def __init__(self, right):
        super().__init__(right.head_dim, 1.0)
        self.inv_freq = right.inv_freq

    def forward(self, positions, q, k):
        return super().forward(torch.where(positions >= AT, positions + 1, positions), q, k)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("site", MISTAKES)
def test_the_script_shows_the_error(checkpoints, tmp_path, site):
    folder = checkpoints / "qwen2-tiny"
    engine = fused.FusedEngine(folder)
    MISTAKES[site](engine.model.layers[1])
    adapter = StepEngine(lambda: engine, name="wrong", folder=folder, dtype="float32")
    report = harness.check(
        adapter, model=folder, prompts=[PROMPT], max_new_tokens=2, schedules=["plain"], out=tmp_path / "out"
    )
    assert report.first_divergence.tap == f"model.layers.1.{site}"
    script = tmp_path / "out" / "culprit" / "show.py"
    assert any(str(script) in note for note in report.notes)
    assert "harness" not in script.read_text().replace(str(tmp_path), "")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    sizes = [float(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines()]
    assert min(sizes) > 1000
    assert f"position {FIRST.get(site, 0)}: " in done.stdout.splitlines()[0]
    repair(Path(script))
    assert subprocess.run([sys.executable, str(script)], capture_output=True, check=False).returncode == 0


def repair(script):
    """Compare the result of the script with itself, rounded to the engine's dtype."""
    text = script.read_text()
    assert 'tensors["actual"]' in text
    script.write_text(text.replace('tensors["actual"]', "result.double().float().double()"))


def test_weights_that_lie_the_other_way_round(tmp_path):
    """GPT-2 has its matrices as [in, out]."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    model.transformer.h[1].mlp.c_fc.weight.data[3] *= 3
    report = harness.check(model, model=tmp_path / "gpt2", prompts=[PROMPT], max_new_tokens=2, out=tmp_path / "out")
    assert report.first_divergence.tap == "transformer.h.1.mlp.c_fc"
    script = tmp_path / "out" / "culprit" / "show.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    repair(script)
    assert subprocess.run([sys.executable, str(script)], capture_output=True, check=False).returncode == 0
