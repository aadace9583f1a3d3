"""ALiBi is handed to HF's attention as a tensor: what it may be instead is tried by HF's own code."""

import pytest
import torch

import harness
from harness.extensions.faults.zoo.models import build

PROMPTS = [list(range(5, 40)), list(range(60, 80))]


def model_of(family, folder):
    """A tiny model, written to the folder, that is the engine too."""
    options = {"alibi": True, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}
    model = build(family, seed=7, settings=options if family == "falcon" else None)
    model.save_pretrained(folder)
    return model


def handed(module, name, change):
    """Let the module have another argument."""
    module.register_forward_pre_hook(
        lambda _, hypotheses, named: (hypotheses, named | {name: change(named[name])}), with_kwargs=True
    )


def scaled(mask):
    return torch.where(mask > -1e4, 3 * mask, mask)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "path", "name", "change", "cause"),
    [
        ("bloom", "transformer.h.0.self_attention", "alibi", torch.zeros_like, "the bias of the scores is left out"),
        ("bloom", "transformer.h.1.self_attention", "alibi", torch.neg, "the bias of the scores has the opposite sign"),
        ("mpt", "transformer.blocks.0.attn", "position_bias", lambda b: b.flip(0), "in reverse order"),
        ("mpt", "transformer.blocks.1.attn", "position_bias", lambda b: b.roll(1, 0), "slope of the one before"),
        ("mpt", "transformer.blocks.0.attn", "position_bias", lambda b: b / 4, "exponents of the slopes begin at 2"),
        ("falcon", "transformer.h.0.self_attention", "attention_mask", scaled, "the bias of the scores is 3 times"),
    ],
)
def test_another_bias_is_named(tmp_path, family, path, name, change, cause):
    engine = model_of(family, tmp_path)
    handed(engine.get_submodule(path), name, change)
    report = harness.check(engine, model=tmp_path, prompts=PROMPTS, max_new_tokens=2, schedules=["plain"])
    assert report.first_divergence is not None
    assert report.first_divergence.tap.startswith(path)
    assert cause in report.first_divergence.explanation.cause
