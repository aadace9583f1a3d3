"""A trainer's replica computes what the trainer does, bit for bit, and nothing that was hooked to it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.extensions.rollout.sides import replica
from harness.formats.checkpoint import resolve
from harness.oracle.model import load_model

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers renames it
MODEL = "llama-tiny"
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def hf():
    return load_model(Path(resolve(MODEL)), dtype=torch.bfloat16, stays=True)


def load(**options):
    return AutoModelForCausalLM.from_pretrained(resolve(MODEL), **{"dtype": torch.bfloat16, **options}).eval()


@torch.no_grad()
def logits(module):
    return module(input_ids=IDS).logits


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"attn_implementation": "eager"}])
def test_a_trainer_of_its_own_dtype_and_attention(hf, options):
    before, trainer = logits(hf.model), load(**options)
    assert torch.equal(logits(replica(trainer, hf).model), logits(trainer))
    assert torch.equal(logits(hf.model), before)


def lora(**options):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    torch.manual_seed(0)
    arguments = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "lora_dropout": 0.2}
    return peft.get_peft_model(load(), peft.LoraConfig(**arguments | options)).eval()


def merged():
    module = lora()
    module.merge_adapter()
    return module


def scaled():
    module = lora()
    module.get_base_model().model.layers[1].self_attn.q_proj.scaling["default"] *= 3
    return module


def second():
    module = lora()
    module.add_adapter("second", module.peft_config["default"])
    module.set_adapter("second")
    return module.eval()


def vera():
    peft = pytest.importorskip("peft", reason="needs PEFT")
    config = peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False)
    return peft.get_peft_model(load(), config).eval()


@pytest.mark.parametrize(
    "make",
    [lora, merged, scaled, second, vera, lambda: lora(use_dora=True), lambda: lora(modules_to_save=["norm"])],
    ids=["beside", "merged", "scaled", "second", "vera", "dora", "whole norm"],
)
def test_adapters_are_as_they_are_in_the_trainer(hf, make):
    before, trainer = logits(hf.model), make()
    assert torch.equal(logits(replica(trainer, hf).model), logits(trainer))
    assert torch.equal(logits(hf.model), before)


def test_what_is_hooked_to_the_trainer_is_not_in_it(hf):
    trainer = lora()
    sound = logits(trainer)
    trainer.get_base_model().model.layers[1].mlp.down_proj.register_forward_hook(lambda *arguments: arguments[-1] * 1.5)
    assert not torch.equal(logits(trainer), sound)
    assert torch.equal(logits(replica(trainer, hf).model), sound)
