"""The callback of docs/rollouts.md in TRL's own trainer, where TRL is installed."""

import importlib.util
import json

import pytest

import harness

from ..documentation import Page

PAGE = Page("rollouts")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def train(tmp_path, checkpoints):
    """Three steps of GRPO on a tiny model, with the callback of the page; returns what was kept."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from reference_engine import EngineConfig, LLMEngine, SamplingParams

    names: dict = {}
    exec(PAGE.files["trl_callback.py"], names)
    folder = checkpoints / "llama-tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token

    def rollout(prompts, trainer):
        trainer.model.save_pretrained(tmp_path / "now")
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        with LLMEngine(tmp_path / "now", EngineConfig(dtype="float32", num_blocks=64)) as engine:
            limits = {"max_new_tokens": 6, "temperature": 1.0, "num_logprobs": 0, "ignore_eos": True}
            outputs = engine.generate(ids, [SamplingParams(seed=seed, **limits) for seed in range(len(ids))])
        return {
            "prompt_ids": ids,
            "completion_ids": [list(output.token_ids) for output in outputs],
            "logprobs": [[logprob.logprob for logprob in output.logprobs] for output in outputs],
        }

    def run(**settings):
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=GRPOConfig(
                output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
                max_steps=3, learning_rate=1e-3, report_to=[], use_cpu=True, save_strategy="no", **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["hu rin pun | hu"] * 12}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )  # fmt: skip
        monitor = harness.RolloutMonitor(history=tmp_path / "gap.jsonl", dtype="float32")
        trainer.add_callback(names["GapCallback"](monitor, trainer))
        trainer.train()
        return [json.loads(line) for line in (tmp_path / "gap.jsonl").read_text().splitlines()]

    return run


def test_the_callback_watches_a_run(train):
    kept = train(bf16=False)
    assert [line["verdict"] for line in kept] == ["pass"] * 3
    assert len({line["gap"]["mean_abs"] for line in kept}) == 3, "the weights change from step to step"


def test_autocast_on_one_side_is_seen(train):
    with pytest.raises(harness.GapError, match="operations: trainer"):
        train(bf16=True)
