"""`harness generate`: what it writes to which stream, and how it ends."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.errors import Code
from reference_engine.server.text import Text

from ..unit.lora_adapter import write_adapter
from .commands import listen_to_ctrl_c

PROMPT = "shau zen shu zei da dan dei lou zo ge vau win to | shau zen"
STATS = (
    r"prompt_tokens=(\d+) generated_tokens=(\d+) elapsed_seconds=([\d.]+) tokens_per_second=([\d.]+) "
    r"ttft_ms=([\d.]+) tpot_ms=([\d.]+|nan) device=(\S+) dtype=(\S+)\n"
)


@pytest.fixture
def generate(harness):
    return lambda *options: harness("generate", "--prompt", PROMPT, *options)


def hf_text(folder, prompt: str, num_tokens: int) -> str:
    """Continue a prompt with HuggingFace, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["qwen3-tiny", "llama-tiny", "qwen2-tiny"])
def test_the_text_is_huggingfaces_and_nothing_else_is_written(generate, checkpoints, name):
    ran = generate("--model", checkpoints / name, "--max-new-tokens", 8, "--dtype", "float32")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == hf_text(checkpoints / name, PROMPT, 8) + "\n"


def test_the_embedded_model_recites_without_being_named(generate):
    assert generate("--max-new-tokens", 4).out == "shu zei da dan\n"


def test_statistics_go_to_standard_error(generate):
    ran = generate("--max-new-tokens", 4, "--show-stats")
    assert ran.out == "shu zei da dan\n"
    prompt, generated, elapsed, rate, ttft, tpot, device, dtype = re.fullmatch(STATS, ran.err).groups()
    assert (prompt, generated, device, dtype) == ("17", "4", "cpu", "float32")
    assert float(rate) == pytest.approx(4 / float(elapsed), rel=0.05)
    assert float(ttft) + 3 * float(tpot) == pytest.approx(1000 * float(elapsed), rel=0.05)


def test_one_token_has_no_time_between_tokens(generate):
    ran = generate("--max-new-tokens", 1, "--show-stats")
    assert math.isnan(float(re.fullmatch(STATS, ran.err)[6]))
    assert generate("--max-new-tokens", 1, "--format", "json").json["tpot_ms"] is None


def test_json_has_text_tokens_and_statistics(generate):
    document = generate("--max-new-tokens", 4, "--format", "json").json
    assert document["text"] == "shu zei da dan"
    assert len(document["token_ids"]) == document["generated_tokens"] == 4
    assert (document["finish_reason"], document["prompt_tokens"]) == ("length", 17)
    assert {"elapsed_seconds", "tokens_per_second", "ttft_ms", "tpot_ms", "device", "dtype"} < set(document)


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen2-tiny"])
def test_a_stream_adds_up_to_the_text(generate, checkpoints, monkeypatch, name):
    pieces = []
    monkeypatch.setattr("harness.cli.generate.write", lambda text, end="\n": pieces.append(text + end))
    generate("--model", checkpoints / name, "--max-new-tokens", 8, "--stream")
    monkeypatch.undo()
    assert len(pieces) > 4
    assert "".join(pieces) == generate("--model", checkpoints / name, "--max-new-tokens", 8).out


def test_equal_seeds_draw_equal_texts(generate):
    options = ("--max-new-tokens", 12, "--temperature", "4", "--seed")
    first, again, other = (generate(*options, seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_top_k_of_one_is_greedy_at_any_temperature(generate):
    greedy = generate("--max-new-tokens", 6).out
    assert generate("--max-new-tokens", 6, "--temperature", "9", "--top-k", "1").out == greedy


def test_the_end_of_sequence_tokens_of_the_generation_config_end_it(generate, changed):
    first = generate("--max-new-tokens", 3, "--format", "json").json["token_ids"]
    folder = changed("qwen3-tiny", generation_config={"eos_token_id": [255, first[2]]})
    document = generate("--model", folder, "--format", "json").json
    assert (document["token_ids"], document["finish_reason"]) == (first, "eos")


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user", "content": "shau zen"}, {"role": "user", "content": "shu zei"}]')
    return path


def test_a_chat_goes_through_the_template(harness, changed, chat):
    message = "{% for m in messages %}{{ m.content }} | {% endfor %}"
    template = "{{ bos_token }} " + message + "{% if add_generation_prompt %}shau{% endif %}"
    folder = changed("qwen3-tiny", tokenizer_config={"chat_template": template})
    options = ("--model", folder, "--max-new-tokens", "3", "--format", "json")
    chatted = harness("generate", "--chat", chat, *options).json
    plain = harness("generate", "--prompt", "shau zen | shu zei | shau", *options).json
    assert (chatted["text"], chatted["token_ids"]) == (plain["text"], plain["token_ids"])


def test_a_chat_without_a_template(harness, chat):
    ran = harness("generate", "--chat", chat)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"{Code.NO_CHAT_TEMPLATE}: the tokenizer has no chat template\n")


def test_a_template_that_refuses_the_message(harness, changed, chat):
    template = "{{ raise_exception('a system message comes first') }}"
    ran = harness(
        "generate", "--chat", chat, "--model", changed("qwen3-tiny", tokenizer_config={"chat_template": template})
    )
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.NO_CHAT_TEMPLATE}: the chat template cannot be applied: a system message")


@pytest.mark.parametrize(("options", "code", "words"), [
    (["--temperature", "nan"], Code.ENGINE_CANNOT_SERVE, "temperature is impossible"),
    (["--max-new-tokens", "0"], Code.ENGINE_CANNOT_SERVE, "max_new_tokens is impossible"),
    (["--max-new-tokens", "100000"], Code.ENGINE_CANNOT_SERVE, "longer than the model allows"),
    (["--top-p", "0"], Code.ENGINE_CANNOT_SERVE, "top_p is impossible"),
    (["--seed", "-1"], Code.ENGINE_CANNOT_SERVE, "seed is impossible"),
    (["--dtype", "int8"], Code.BAD_OPTION, "unknown dtype"),
    (["--device", "cuda:99"], Code.NO_DEVICE, "no such device"),
    (["--model", "/nowhere"], Code.NOT_A_CHECKPOINT, "no such folder"),
    (["--engine-option", "debug_checks=yes"], Code.BAD_OPTION, "debug_checks must be true or false"),
    (["--engine-option", "attention_backend=nope"], Code.BAD_OPTION, "unknown attention backend"),
    (["--engine-option", "attention_backend=varlen"], Code.BAD_OPTION, "found float32; 16; cpu"),
    (["--engine-option", "num_blocks=2"], Code.ENGINE_CANNOT_SERVE, "larger than the whole KV pool"),
    (["--stream", "--format", "json"], Code.BAD_OPTION, "not streamed"),
])  # fmt: skip
def test_bad_input(generate, options, code, words):
    ran = generate(*options)
    assert ran.status == 2
    assert ran.err.startswith(f"{code}: ")
    assert words in ran.err


def test_an_empty_prompt(harness):
    ran = harness("generate", "--prompt", " ")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.EMPTY_PROMPT)


def test_no_tokenizer(generate, changed):
    folder = changed("qwen3-tiny")
    (folder / "tokenizer.json").unlink()
    ran = generate("--model", folder)
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.NO_TOKENIZER)


def test_a_tokenizer_of_vocabulary_and_merges(harness, changed):
    folder = changed("qwen3-tiny")
    (folder / "tokenizer.json").unlink()
    vocabulary = {letter: at for at, letter in enumerate([*sorted(ByteLevel.alphabet())[:255], "he"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": null}')
    ran = harness("generate", "--model", folder, "--prompt", "the theme", "--max-new-tokens", 3)
    assert (ran.status, ran.out.removesuffix("\n")) == (0, hf_text(folder, "the theme", 3)), ran.err
    served = Text(folder)
    assert served.encode("the theme") == AutoTokenizer.from_pretrained(folder)("the theme")["input_ids"]
    (folder / "merges.txt").unlink()
    assert harness("generate", "--model", folder, "--prompt", "the theme").err.startswith(Code.NO_TOKENIZER)


def test_another_engine_continues_the_prompt_with_the_same_tokens(generate):
    ours = generate("--max-new-tokens", 6, "--format", "json").json
    ran = generate("--engine", "hf", "--max-new-tokens", 6, "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    same = ("text", "token_ids", "finish_reason", "prompt_tokens", "device", "dtype")
    assert {name: ran.json[name] for name in same} == {name: ours[name] for name in same}


@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_another_engine_ends_at_the_checkpoints_end_of_sequence_too(generate, changed, file):
    first = generate("--max-new-tokens", 3, "--format", "json").json["token_ids"]
    folder = changed("qwen3-tiny", generation_config={"eos_token_id": None}, config={"eos_token_id": None})
    path = folder / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [255, first[2]]}))
    document = generate("--engine", "hf", "--model", folder, "--format", "json").json
    assert (document["token_ids"], document["finish_reason"]) == (first, "eos")


@pytest.mark.parametrize(("options", "code", "words"), [
    (["--temperature", "1"], Code.BAD_OPTION, "likeliest tokens"),
    (["--lora", "somewhere"], Code.BAD_OPTION, "likeliest tokens"),
    (["--max-new-tokens", "0"], Code.BAD_OPTION, "--max-new-tokens"),
    (["--dtype", "int8"], Code.BAD_OPTION, "unknown dtype"),
    (["--engine-option", "block_size=4"], Code.BAD_OPTION, "has no option 'block_size'"),
])  # fmt: skip
def test_what_another_engine_cannot_do_is_refused(generate, options, code, words):
    ran = generate("--engine", "hf", *options)
    assert (ran.status, ran.out, ran.err.split(":")[0]) == (2, "", code)
    assert words in ran.err


def test_an_engine_without_steps_or_generate_is_told_what_it_lacks(generate, install):
    source = """
from harness.engines import Capabilities

class Engine:
    name, capabilities = "mine", Capabilities(schedules=("plain",))

    def run(self, workload, writer):
        raise AssertionError

def open_engine(folder, *, dtype, device, options):
    return Engine()
"""
    ran = generate("--engine", install(source))
    assert (ran.status, ran.out, ran.err.split(":")[0]) == (2, "", Code.ENGINE_LACKS_METHOD)


@pytest.mark.slow
def test_ctrl_c_amid_a_stream():
    command = [sys.executable, "-c", "from harness.cli import main; main()", "generate", "--prompt", PROMPT, "--stream"]
    # So hot that what is drawn is no text that ends soon.
    options = ["--max-new-tokens", "490", "--temperature", "50", "--engine-option", "debug_checks=true"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_an_adapter_changes_the_text_and_one_that_is_none_is_refused(generate, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    plain, adapted = generate("--max-new-tokens", 6), generate("--max-new-tokens", 6, "--lora", adapter)
    assert (adapted.status, adapted.err) == (0, "")
    assert adapted.out != plain.out
    (adapter / "adapter_model.safetensors").unlink()
    refused = generate("--lora", adapter)
    assert (refused.status, refused.out) == (2, "")
    assert "the adapter's weights cannot be read" in refused.err


@pytest.mark.parametrize(("options", "given"), [((), "neither"), (("--prompt", "hu", "--chat", "chat.json"), "both")])
def test_a_prompt_or_a_chat(harness, options, given):
    ran = harness("generate", *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"{Code.BAD_OPTION}: one request is continued\n")
    assert f"actual:   {given}\n" in ran.err
