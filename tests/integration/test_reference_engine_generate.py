"""`reference-engine generate`: what it writes to which stream, and how it ends."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
import typer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from reference_engine.cli import app
from reference_engine.server.text import Text

from ..unit.lora_adapter import write_adapter
from .commands import listen_to_ctrl_c

PROMPT = "shau zen shu zei da dan dei lou zo ge vau win to | shau zen"
STATS = (
    r"prompt_tokens=(\d+) generated_tokens=(\d+) elapsed_seconds=([\d.]+) tokens_per_second=([\d.]+) "
    r"ttft_ms=([\d.]+) tpot_ms=([\d.]+|nan) device=(\S+) dtype=(\S+)\n"
)


@pytest.fixture
def generate(engine):
    return lambda *options: engine("generate", "--prompt", PROMPT, *options)


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
    assert document["prompt_pieces"] == ["<bos>", *PROMPT.split()]
    assert document["pieces"] == document["text"].split()
    assert len(document["prompt_token_ids"]) == 17
    assert document["notes"] == []


@pytest.mark.parametrize(
    ("prompt", "generation", "options", "note"),
    [
        ("<bos>hu rin", {}, (), "the prompt begins with <bos>, and the tokenizer adds another one"),
        ("hu rin", {"do_sample": True, "temperature": 0.6, "top_p": 0.95}, ("--temperature", "0.6"), "has top_p=0.95:"),
        ("hu rin", {"do_sample": False, "temperature": 0.6}, (), None),
    ],
)
def test_a_doubled_begin_and_unused_sampling_defaults_are_noted(engine, changed, prompt, generation, options, note):
    folder = changed("qwen3-tiny", generation_config=generation)
    asked = ("--model", folder, "--prompt", prompt, "--max-new-tokens", 1, *options)
    ran = engine("generate", *asked, "--format", "json")
    assert [note in item for item in ran.json["notes"]] == ([] if note is None else [True])
    assert ("note: " in ran.err) == (note is not None)


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen2-tiny"])
def test_a_stream_adds_up_to_the_text(generate, checkpoints, monkeypatch, name):
    pieces = []
    monkeypatch.setattr("reference_engine.cli._write", pieces.append)
    generate("--model", checkpoints / name, "--max-new-tokens", 8, "--stream")
    monkeypatch.undo()
    assert len(pieces) > 4
    assert "".join(pieces) == generate("--model", checkpoints / name, "--max-new-tokens", 8).out


def test_equal_seeds_draw_equal_texts(generate):
    options = ("--max-new-tokens", 12, "--temperature", "4", "--seed")
    first, again, another_seed = (generate(*options, seed).out for seed in (1, 1, 2))
    assert first == again != another_seed


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


def test_a_chat_goes_through_the_template(engine, changed, chat):
    message = "{% for m in messages %}{{ m.content }} | {% endfor %}"
    template = "{{ bos_token }} " + message + "{% if add_generation_prompt %}shau{% endif %}"
    folder = changed("qwen3-tiny", tokenizer_config={"chat_template": template})
    options = ("--model", folder, "--max-new-tokens", "3", "--format", "json")
    chatted = engine("generate", "--chat", chat, *options).json
    plain = engine("generate", "--prompt", "shau zen | shu zei | shau", *options).json
    assert (chatted["text"], chatted["token_ids"]) == (plain["text"], plain["token_ids"])


def test_a_chat_without_a_template(engine, chat):
    ran = engine("generate", "--chat", chat)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("RequestError: the checkpoint has no chat template\n")


def test_a_template_that_refuses_the_message(engine, changed, chat):
    template = "{{ raise_exception('a system message comes first') }}"
    ran = engine(
        "generate", "--chat", chat, "--model", changed("qwen3-tiny", tokenizer_config={"chat_template": template})
    )
    assert ran.status == 2
    assert ran.err.startswith("RequestError: the chat template does not take the messages: a system message")


@pytest.mark.parametrize(("options", "code", "words"), [
    (["--temperature", "nan"], "RequestError", "temperature is impossible"),
    (["--max-new-tokens", "0"], "RequestError", "max_new_tokens is impossible"),
    (["--max-new-tokens", "100000"], "RequestError", "longer than the model allows"),
    (["--top-p", "0"], "RequestError", "top_p is impossible"),
    (["--seed", "-1"], "RequestError", "seed is impossible"),
    (["--dtype", "int8"], "ConfigError", "unknown dtype"),
    (["--device", "cuda:99"], "DeviceError", "the CUDA device is not there"),
    (["--model", "/nowhere"], "CheckpointError", "no such folder"),
    (["--engine-option", "debug_checks=yes"], "ConfigError", "debug_checks must be true or false"),
    (["--engine-option", "attention_backend=nope"], "ConfigError", "unknown attention backend"),
    (["--engine-option", "attention_backend=varlen"], "ConfigError", "actual:   float32; 16; cpu"),
    (["--engine-option", "num_blocks=2"], "CapacityError", "larger than the whole KV pool"),
    (["--stream", "--format", "json"], "ConfigError", "not streamed"),
    (["--format", "xml"], "ConfigError", "human or json"),
    (["--model", ""], "ConfigError", "--model is given empty"),
    (["--engine", "hf"], "UsageError", "No such option: --engine"),
])  # fmt: skip
def test_bad_input(generate, options, code, words):
    ran = generate(*options)
    assert ran.status == 2
    assert ran.err.startswith(f"{code}: ")
    assert words in ran.err


def test_an_empty_prompt(engine):
    ran = engine("generate", "--prompt", " ")
    assert (ran.status, ran.err.split(":")[0]) == (2, "RequestError")


def test_no_tokenizer(generate, changed):
    folder = changed("qwen3-tiny")
    (folder / "tokenizer.json").unlink()
    ran = generate("--model", folder)
    assert (ran.status, ran.err.split(":")[0]) == (2, "ConfigError")


def test_a_tokenizer_of_vocabulary_and_merges(engine, changed):
    folder = changed("qwen3-tiny")
    (folder / "tokenizer.json").unlink()
    vocabulary = {letter: at for at, letter in enumerate([*sorted(ByteLevel.alphabet())[:255], "he"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": null}')
    ran = engine("generate", "--model", folder, "--prompt", "the theme", "--max-new-tokens", 3)
    assert (ran.status, ran.out.removesuffix("\n")) == (0, hf_text(folder, "the theme", 3)), ran.err
    served = Text(folder)
    assert served.encode("the theme") == AutoTokenizer.from_pretrained(folder)("the theme")["input_ids"]
    (folder / "merges.txt").unlink()
    assert engine("generate", "--model", folder, "--prompt", "the theme").err.startswith(
        "ConfigError: tokenizer.json is missing"
    )


@pytest.mark.slow
def test_ctrl_c_amid_a_stream():
    command = [sys.executable, "-m", "reference_engine", "generate", "--prompt", PROMPT, "--stream"]
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


@pytest.mark.parametrize(("options", "actual"), [((), "neither"), (("--prompt", "hu", "--chat", "chat.json"), "both")])
def test_a_prompt_or_a_chat(engine, options, actual):
    ran = engine("generate", *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("ConfigError: one request is continued\n")
    assert f"actual:   {actual}\n" in ran.err


def test_an_error_is_json_where_json_is_asked_for(generate):
    ran = generate("--model", "/nowhere", "--format", "json")
    assert ran.status == 2
    assert ran.json["error"] | {"hint": ""} == {
        "code": "CheckpointError", "message": "there is no such folder, and this is no hub id", "where": "/nowhere",
        "expected": None, "actual": None, "hint": "",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '{"messages": [{}], "temperature": 1}', '"hu"'])
def test_a_file_without_a_conversation(engine, tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text)
    ran = engine("generate", "--chat", path)
    assert (ran.status, ran.out, ran.err.split(":")[0]) == (2, "", "ConfigError")
    assert str(path) in ran.err
    assert "a list of messages" in ran.err


OPTIONS = {
    "generate": ["--prompt", "--chat", "--model", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
                 "--seed", "--dtype", "--device", "--engine-option", "--lora", "--local-files-only", "--stream",
                 "--show-stats", "--format"],
    "serve": ["--model", "--host", "--port", "--name", "--dtype", "--device", "--engine-option", "--lora",
              "--local-files-only"],
}  # fmt: skip


def test_the_options_are_those_that_were_promised():
    commands = typer.main.get_command(app).commands
    assert {name: [option.opts[0] for option in command.params] for name, command in commands.items()} == OPTIONS
