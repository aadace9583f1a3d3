"""Arguments that cannot be used: a code, what was expected, and the argument's own name."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import harness
from harness import Code
from harness.engines import engine_names

from ..own_model import NAMES, OwnModel, load

IDS = [[1, 5, 6, 7]]


def refused(engine, code="H", *words, **options):
    """Assert that the error begins with the code and says the words; return it as text."""
    with pytest.raises(harness.HarnessError) as caught:
        harness.check(engine, **{"model": "qwen3-tiny", "prompts": IDS, "max_new_tokens": 2} | options)
    error = caught.value
    assert error.args == (str(error),)
    assert "--" not in str(error)  # an argument is no option of the command line
    assert str(error).startswith(code)
    for word in words:
        assert word in str(error)
    return str(error)


@pytest.fixture(scope="module")
def module(checkpoints):
    return load(checkpoints / "qwen3-tiny")


@pytest.mark.parametrize(
    ("engine", "code", "words"),
    [
        (None, Code.UNKNOWN_ENGINE, ", ".join(engine_names())),
        ("refrence", Code.UNKNOWN_ENGINE, ", ".join(engine_names())),
        (OwnModel, Code.BAD_OPTION, "OwnModel is a class"),
        (lambda tokens: tokens, Code.BAD_OPTION, "nothing that can be checked"),
        (3, Code.BAD_OPTION, "actual:   3"),
    ],
)
def test_what_is_no_engine(engine, code, words):
    refused(engine, code, words)


@pytest.mark.parametrize(
    ("prompts", "code", "words"),
    [
        ([], Code.EMPTY_PROMPT, "prompts="),
        ([""], Code.EMPTY_PROMPT, "prompts[0]"),
        ("  ", Code.EMPTY_PROMPT, "prompts[0]"),
        ([[1], []], Code.EMPTY_PROMPT, "prompts[1]"),
        ([1, 2, 3], Code.BAD_OPTION, "prompts=[[1, 2, 3]]"),
        ([[1, True]], Code.BAD_OPTION, "prompts[0]"),
        ([[1.0, 2.0]], Code.BAD_OPTION, "prompts[0]"),
        (torch.ones(1, 4), Code.BAD_OPTION, "prompts="),
        ([[1, 256]], Code.TOKEN_OUTSIDE_VOCABULARY, "request 0, position 1"),
        ([[1] * 600], Code.PROMPT_TOO_LONG, "lower max_new_tokens="),
    ],
)
def test_prompts_that_make_no_sense(prompts, code, words):
    refused("reference", code, words, prompts=prompts)


def test_token_ids_may_be_a_tensor():
    assert harness.check(
        "reference", model="qwen3-tiny", prompts=[torch.tensor([1, 5, 6])], max_new_tokens=2, schedules=["plain"]
    )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"dtype": "float8"}, Code.BAD_OPTION, "dtype="),
        ({"dtype": torch.float64}, Code.BAD_OPTION, "float64"),
        ({"device": "cuda:99"}, Code.NO_DEVICE, 'device="cpu"'),
        ({"device": "xpu"}, Code.BAD_OPTION, "device="),
        ({"max_new_tokens": 0}, Code.BAD_OPTION, "max_new_tokens="),
        ({"schedules": ["fast"]}, Code.BAD_OPTION, "unknown schedule 'fast'"),
        ({"engine_options": {"blocksize": 4}}, Code.BAD_OPTION, "engine_options="),
        ({"names": {"a": "b"}}, Code.BAD_OPTION, "names are for an nn.Module"),
        ({"model": "no such folder/x"}, Code.NOT_A_CHECKPOINT, "no such folder"),
        ({"model": nn.Linear(2, 2)}, Code.BAD_OPTION, "no model of HF's"),
    ],
)
def test_options_that_make_no_sense(options, code, words):
    refused("reference", code, words, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "module is on another device"),
        ({"dtype": "bfloat16"}, "another dtype than was asked for"),
        ({"model": None}, "needs the checkpoint"),
        ({"engine_options": {"a": 1}}, "opened by its name"),
        ({"names": NAMES | {"blocks.*.attn.w9": "model.layers.*.self_attn.q_proj"}}, "no module 'blocks.*.attn.w9'"),
        ({"names": NAMES | {"ln": "model.final_norm"}}, "nothing called 'model.final_norm'"),
        ({"names": NAMES | {"ln": "lm_head"}}, "'ln' and 'head' are both called 'lm_head'"),
        ({"names": {"": "model"}}, "no module of OwnModel has a name of HF's"),
    ],
)
def test_what_does_not_go_with_a_module(module, options, words):
    refused(module, Code.BAD_OPTION, words, **options)


def test_a_module_without_values_in_its_weights(checkpoints):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoints / "qwen3-tiny"))
    for options in ({}, {"model": None}):
        refused(model, Code.ENGINE_CANNOT_SERVE, "on the meta device", **options)
    assert "on the meta device" in refused("reference", model=model)


def test_a_module_that_returns_no_logits(module):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, tokens):
            return {"hidden": self.inner(tokens)}

    refused(Body(), Code.ENGINE_CANNOT_SERVE, "dict of hidden", names={})


def test_a_module_of_another_vocabulary(module):
    text = refused(nn.Sequential(module, nn.Linear(256, 7)), names={})
    assert "256 logits a token" in text
    assert "7 numbers a token" in text


def test_what_a_module_raises_names_it(module):
    class Failing(OwnModel):
        def forward(self, tokens):
            raise ZeroDivisionError("deep inside")

    model = Failing.__new__(Failing)
    model.__dict__.update(module.__dict__)
    refused(model, Code.ENGINE_FAILED, "ZeroDivisionError: deep inside", "Failing", names=NAMES)


def test_what_a_models_code_makes_of_a_module_that_is_not_hfs_names_the_engine(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen3-tiny", dtype=torch.float32)
    model.model.layers[1].self_attn.register_forward_hook(
        lambda _module, args, output: output if output[0].shape[1] > 1 else (output[0][..., :5], output[1])
    )
    refused(model, Code.ENGINE_FAILED, "RuntimeError")  # a decode step: HF's own residual cannot be added


def test_an_out_folder_that_is_taken(module, tmp_path):
    (tmp_path / "mine").touch()
    assert refused(module, names=NAMES, out=tmp_path).startswith(Code.OUTPUT_EXISTS)


def test_text_for_a_model_object_without_a_tokenizer():
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    refused(model, Code.NO_TOKENIZER, "prompts=[[1, 2, 3]]", model=None, prompts=["hello"])
    assert harness.check(model, prompts=IDS, max_new_tokens=2)
