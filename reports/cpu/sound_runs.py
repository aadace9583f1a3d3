"""Run `harness server sampler` and `harness server chat` on sound servers of the reference engine, with seeds of each run's own.

    python reports/cpu/sound_runs.py --first-seed 7000 --seconds 600 [--only sampler,schema,conversations,text]

Prints a JSON line for each run. A sampler's run is of 60 draws of each setting; one of a schema of 120 draws; one of
conversations has 40 generated ones; one of text is of two prompts of its own. Models of text are drawn from the seed.
"""

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from harness.extensions.server.address import Address
from harness.extensions.server.chat import text as written
from harness.extensions.server.chat.run import check_tokens
from harness.extensions.server.client import Client
from harness.extensions.server.sampler.run import check_sampler
from harness.formats.checkpoint import Checkpoint
from harness.plan import plan_engine
from harness.results.check import Outcome
from reference_engine import EngineConfig, LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text
from tests.extensions.server.chat.structured.conftest import write_json_tokenizer
from tests.extensions.server.chat.tokens.conftest import write_tokenizer
from tests.extensions.server.sampler.conftest import plan_of, served
from tests.extensions.server.sampler.test_grammar import masked_first, masking
from tests.loopback import serving

WORDS = ["stone", "naïve", "日本", "42", "x_y", "Ωmega", "🦉", "to", "the", "\n", "--", "e\u0301", "{}", "end"]
SPACINGS = ("any whitespace", "no whitespace")


def chat_model(folder, seed):
    """Write a random Llama of one layer over bytes."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=256, eos_token_id=[258, 259],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [258, 259]}))


def schema_model(folder, seed):
    """Write a random Qwen 3 of two layers over bytes and pieces of JSON."""
    write_json_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=273, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
        eos_token_id=271, bos_token_id=270,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def serve_chat(stack, folder, dtype):
    engine = stack.enter_context(LLMEngine(folder, EngineConfig(dtype=dtype, num_blocks=600)))
    url = stack.enter_context(serving(build_app(engine, Text(folder), model="chat")))
    return Address(url=url, timeout_s=600)


def sampler(seed):
    dtype = ("float32", "bfloat16")[seed % 2]
    with served(dtype=dtype) as address:
        result = check_sampler(plan_of(dtype), address, num_draws=60, seed=seed)
    alarms = [*result.findings, *(finding for setting in result.settings for finding in setting.findings)]
    return result.outcome is not Outcome.PASS, [finding.message for finding in alarms]


def schema(seed):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        schema_model(Path(folder), seed)
        plan = plan_engine(model=folder, dtype="float32")
        with masking(plan, patch, masked_first, SPACINGS[seed % 2]) as address:
            result = check_sampler(plan, address, num_draws=120, seed=seed, only=("json_schema",))
    alarms = [*result.findings, *(finding for setting in result.settings for finding in setting.findings)]
    return result.outcome is not Outcome.PASS, [finding.message for finding in alarms]


def conversations(seed):
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        chat_model(Path(name), seed)
        address = serve_chat(stack, Path(name), ("float32", "bfloat16")[seed % 2])
        result = check_tokens(
            Checkpoint(Path(name)), address, model="chat", num_conversations=40, seed=seed
        )
    said = [item.name for item in result.differences] + [item.message for item in result.findings]
    return result.outcome is not Outcome.PASS, said


def text(seed):
    draw = random.Random(seed)
    prompts = tuple(" ".join(draw.choices(WORDS, k=draw.randint(2, 8))) for _ in range(2))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        chat_model(Path(name), seed)
        address = serve_chat(stack, Path(name), ("float32", "bfloat16")[seed % 2])
        patch.setattr(written, "_PROMPTS", prompts)

        async def run():
            async with Client(address) as client:
                writing = written.TextCheck(client, "chat", Checkpoint(Path(name)).tokenizer.hf)
                await writing.run()
            return writing

        writing = asyncio.run(run())
    return bool(writing.differences) or not writing.num_answers, [difference.name for difference in writing.differences]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", default="sampler,schema,conversations,text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    for seed in itertools.count(options.first_seed):
        for kind in options.only.split(","):
            begin = time.monotonic()
            if begin > end:
                return
            is_alarm, said = globals()[kind](seed)
            line = {"kind": kind, "seed": seed, "alarm": is_alarm, "said": said, "seconds": time.monotonic() - begin}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
