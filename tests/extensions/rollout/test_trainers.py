"""Trainers as people run them: under autocast, with LoRA, with checkpointed layers, sharded over ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import harness
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import resolve

from .training import prompts, rollout

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers renames it
MODEL = "llama-tiny"
RANKS = Path(__file__).with_name("ranks.py")


def load(dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=dtype)


def with_lora(dtype=torch.bfloat16):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.2
    )
    return peft.get_peft_model(load(dtype), config)


def compare(rows, trainer, **arguments):
    return harness.rollout(rows[:4], **{"model": MODEL, "trainer": trainer, "dtype": "bfloat16", **arguments})


def outside(report):
    return [(term.kind, term.side) for term in report.terms if not term.is_rounding]


def sees_operations(report):
    return any(term.kind == "operations" for term in report.terms) and "logits are seen" not in report.text()


@pytest.mark.slow
def test_autocast_of_the_caller_is_the_trainers_alone(rows):
    trainer, seen = load(torch.float32), []
    trainer.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        report = compare(rows, trainer, layout="packed")
    assert seen == [torch.bfloat16]
    assert outside(report) == []
    assert sees_operations(report)
    assert report.sides[1].rms == compare(rows, None).sides[0].rms, "the truth is run without it"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Rows of an engine that serves the merged weights."""
    folder = tmp_path_factory.mktemp("merged")
    with_lora(torch.float32).merge_and_unload().save_pretrained(folder)
    return rollout(folder, prompts(4))


@pytest.mark.slow
@pytest.mark.parametrize("is_merged", [False, True])
def test_lora_as_the_trainer(adapted, is_merged):
    trainer = with_lora()
    if is_merged:
        trainer.merge_adapter()
    report = compare(adapted, trainer, model=trainer)
    assert outside(report) == []
    assert sees_operations(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "autocast"])
def test_a_wrong_layer_of_a_trainer_that_rounds_more_often(adapted, rows, name):
    trainer = with_lora() if name == "lora" else load(torch.float32)
    base = trainer.get_base_model() if name == "lora" else trainer
    with torch.no_grad():  # the replica has neither the hook nor the larger floor of it
        base.model.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    arguments = {"rows": adapted, "model": trainer} if name == "lora" else {"rows": rows}
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
        report = compare(trainer=trainer, **arguments)
    assert outside(report) == [("operations", "trainer")]
    assert "operations: trainer: model.layers.1.mlp.down_proj;" in report.findings[0].message


@pytest.mark.slow
def test_an_engine_without_the_adapter(adapted, rows):
    report = compare(rows, with_lora())  # the model, and the engine, are the base
    assert ("weights", "trainer") in outside(report)
    (term,) = (term for term in report.terms if term.kind == "weights")
    assert "6 tensors are other than the model's" in term.detail


def test_adapters_that_no_weights_can_hold_are_refused(rows):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    for arguments in ({}, {"model": "trainer"}):
        trainer = peft.get_peft_model(load(), config)
        with pytest.raises(HarnessError) as caught:
            compare(rows, trainer, **dict.fromkeys(arguments, trainer))
        assert caught.value.code is Code.BAD_OPTION
        text = str(caught.value)
        assert "adapters of this kind cannot be merged: PROMPT_TUNING" in text
        assert f"where:    {'model=' if arguments else 'trainer='}" in text
        assert "try:      give a copy with plain weights" in text


@pytest.mark.slow
def test_checkpointed_layers_are_seen_under_their_names(rows):
    wrapped = load()
    wrapped.gradient_checkpointing_enable()
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    with torch.no_grad():  # a wrong layer: between two others, so that only its own name can be right
        wrapped.model.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    report = compare(rows, wrapped.train())
    assert wrapped.training
    assert outside(report) == [("operations", "trainer")]
    assert "operations: trainer: model.layers.1.mlp.down_proj;" in report.findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fully_shard", "tensor_parallel", "flat_shards"])
def test_a_trainer_that_two_ranks_share(kind):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RANKS), kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sound") == 2, done.stdout
