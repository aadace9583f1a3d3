"""Whatever is wrong with the input: a stable code, the values that are wrong, exit status 2, and no traceback."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from harness.errors import Code

from .commands import ENGINE, rewrite

TOKENS = ["--token-ids", "1,4,5", "--max-new-tokens", "2", "--schedule", "plain"]
TAP = "model.layers.1.mlp.up_proj"


PROGRESS = re.compile(r"\A(?:[^\n]*: \d+%[^\n]*\n)*")


@pytest.fixture
def refused(harness) -> Callable[..., str]:
    """Run a command that must refuse its input; return its message after having compared both of its forms."""

    def call(code: Code, *arguments: object) -> str:
        ran = harness(*arguments, "--format", "json")
        assert ran.status == 2, ran.err
        error = ran.json["error"]
        assert error["code"] == code, ran.err
        said = PROGRESS.sub("", ran.err)  # which a slow machine is shown before the error
        assert said.startswith(f"{code}: {error['message']}\n")
        for name in ("where", "expected", "actual", "hint"):
            assert error[name] is None or error[name] in ran.err
        return ran.err

    return call


@pytest.fixture
def checkpoint(tmp_path: Path, llama: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "checkpoint"))


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def header(folder: Path, text: bytes, *, length: int | None = None) -> None:
    """Put another header before the weights of a checkpoint."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


def overlap(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    header(folder, text + bytes(8), length=len(text))


# Checkpoints


def test_a_folder_that_is_no_checkpoint(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    message = refused(Code.NOT_A_CHECKPOINT, "check", "--model", tmp_path / "empty", *TOKENS)
    assert "no config.json" in message
    assert str(tmp_path / "empty") in message


def test_a_path_that_is_not_there(refused, tmp_path):
    message = refused(Code.NOT_A_CHECKPOINT, "check", "--model", tmp_path / "nowhere", *TOKENS)
    assert str(tmp_path / "nowhere") in message


def test_a_checkpoint_without_config(refused, checkpoint):
    (checkpoint / "config.json").unlink()
    assert "no config.json" in refused(Code.NOT_A_CHECKPOINT, "golden", "--model", checkpoint, *TOKENS[:4])


@pytest.mark.parametrize("text", ["{", "[1]", "", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object(refused, checkpoint, text):
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(Code.BAD_CONFIG, "check", "--model", checkpoint, *TOKENS)


HEADERS = {
    "longer than any file": (lambda folder: header(folder, b"{}", length=1 << 63), "9223372036854775808"),
    "a bomb": (lambda folder: header(folder, b'{"a":' + b"[" * 200_000), "model.safetensors"),
    "no object": (lambda folder: header(folder, b"[[[["), "'{'"),
    "overlapping tensors": (overlap, "model.safetensors"),
    "a pointer of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors",
    ),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors"),
}


@pytest.mark.parametrize(("damage", "value"), HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("command", ["check", "inspect"])
def test_a_hostile_header(refused, checkpoint, damage, value, command):
    damage(checkpoint)
    arguments = ["inspect", checkpoint] if command == "inspect" else ["check", "--model", checkpoint, *TOKENS]
    assert value in refused(Code.DAMAGED_SAFETENSORS, *arguments)


@pytest.mark.parametrize("num_bytes", [4, 1000, -1000])
def test_truncated_weights(refused, checkpoint, num_bytes):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert str(weights) in refused(Code.DAMAGED_SAFETENSORS, "check", "--model", checkpoint, *TOKENS)


def test_an_index_that_names_a_missing_shard(refused, checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints / "qwen2-tiny", tmp_path / "sharded"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refused(Code.MISSING_SHARD, "check", "--model", folder, *TOKENS)
    assert "model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize(
    "auto_map", [{}, {"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.LM"}}]
)
def test_a_model_type_that_transformers_does_not_know(refused, checkpoint, auto_map):
    configure(checkpoint, model_type="nonsense", **auto_map)  # and no code of the checkpoint is run, or asked about
    assert "nonsense" in refused(Code.UNSUPPORTED_ARCHITECTURE, "check", "--model", checkpoint, *TOKENS)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=32, bos_token_id=1, eos_token_id=2))


def bert():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return BertLMHeadModel(BertConfig(**sizes, vocab_size=32, is_decoder=True))


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 16}
    return OPTForCausalLM(OPTConfig(**sizes, vocab_size=32, word_embed_proj_dim=16))


@pytest.mark.parametrize("build", [gpt2, bert, opt])
def test_a_model_that_the_engine_does_not_know(refused, tmp_path, build):
    model = build()
    model.save_pretrained(tmp_path / "other")
    message = refused(Code.UNSUPPORTED_ARCHITECTURE, "check", "--model", tmp_path / "other", *TOKENS)
    assert f"found {model.config.model_type}" in message
    assert "the reference engine" in message


def test_quantised_weights(refused, checkpoint):
    configure(checkpoint, quantization_config={"quant_method": "gptq", "bits": 4})
    message = refused(Code.UNKNOWN_QUANTISATION, "check", "--model", checkpoint, *TOKENS)
    assert "the field group_size is missing" in message


CONTRADICTIONS = {
    "hidden_size": ({"hidden_size": 192}, "misshapen", "[256, 192]", "[256, 96]"),
    "KV heads": ({"num_key_value_heads": 3}, "misshapen", "[96, 96]", "[64, 96]"),
    "a vocabulary of 10^9": ({"vocab_size": 10**9}, "misshapen", "[1000000000, 96]", "[256, 96]"),
    "a layer more": ({"num_hidden_layers": 4}, "missing", "model.layers.3.input_layernorm.weight", ""),
    "a layer less": ({"num_hidden_layers": 2}, "unexpected", "model.layers.2.input_layernorm.weight", ""),
    "an untied head": ({"tie_word_embeddings": False}, "missing", "lm_head.weight", ""),
}


@pytest.mark.parametrize(("values", "kind", "expected", "actual"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors(refused, checkpoint, values, kind, expected, actual):
    configure(checkpoint, **values)
    message = refused(Code.TENSORS_CONTRADICT_CONFIG, "check", "--model", checkpoint, *TOKENS)
    assert kind in message
    assert expected in message
    assert actual in message


@pytest.mark.parametrize("values", [{"hidden_act": "nope"}, {"vocab_size": "many"}, {"num_attention_heads": 5}])
def test_a_config_with_an_impossible_value(refused, checkpoint, values):
    configure(checkpoint, **values)
    assert str(checkpoint / "config.json") in refused(Code.BAD_CONFIG, "check", "--model", checkpoint, *TOKENS)


# Requests


@pytest.mark.parametrize(
    ("ids", "at", "actual"), [("1,256", 1, "256"), ("-5,3", 0, "-5"), (f"1,2,{2**70}", 2, str(2**70))]
)
def test_token_ids_outside_the_vocabulary(refused, llama, ids, at, actual):
    message = refused(Code.TOKEN_OUTSIDE_VOCABULARY, "check", "--model", llama, "--token-ids", ids)
    assert f"request 0, position {at}" in message
    assert "expected: 0 to 255" in message
    assert f"actual:   {actual}" in message


@pytest.mark.parametrize("option", [("--prompt", ""), ("--prompt", "  \n "), ("--token-ids", ""), ("--token-ids", " ")])
def test_an_empty_prompt(refused, llama, option):
    assert f"where:    {option[0]}" in refused(Code.EMPTY_PROMPT, "check", "--model", llama, *option)


def test_an_empty_prompt_file(refused, llama, tmp_path):
    (tmp_path / "prompt.txt").write_text("\n")
    message = refused(Code.EMPTY_PROMPT, "check", "--model", llama, "--prompt-file", tmp_path / "prompt.txt")
    assert f"where:    --prompt-file {tmp_path / 'prompt.txt'}" in message


@pytest.mark.parametrize("request_line", ['prompt = " "', "token_ids = []"])
def test_an_empty_prompt_in_a_case(refused, llama, tmp_path, request_line):
    case = tmp_path / "case.toml"
    case.write_text(f'schema_version = 1\nmodel = "{llama}"\n[[requests]]\n{request_line}\n')
    assert "where:    request 0" in refused(Code.EMPTY_PROMPT, "check", "--case", case)


def test_a_prompt_longer_than_the_model_allows(refused, llama):
    ids = ",".join(["4"] * 500)
    message = refused(Code.PROMPT_TOO_LONG, "check", "--model", llama, "--token-ids", ids, "--max-new-tokens", "13")
    assert "expected: at most 512 positions" in message
    assert "500 prompt tokens + 13 new = 513" in message


def test_no_tokenizer(refused, checkpoint):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert str(checkpoint) in refused(Code.NO_TOKENIZER, "check", "--model", checkpoint, "--prompt", "a")


def test_a_tokenizer_that_cannot_be_read(refused, checkpoint):
    (checkpoint / "tokenizer.json").write_text("{}")
    assert str(checkpoint) in refused(Code.NO_TOKENIZER, "check", "--model", checkpoint, "--prompt", "a")


def test_a_prompt_file_that_cannot_be_read(refused, tmp_path):
    message = refused(Code.BAD_OPTION, "check", "--prompt-file", tmp_path / "nowhere.txt")
    assert f"actual:   {tmp_path / 'nowhere.txt'}" in message


# Options

OPTIONS = {
    "engine": (["--engine", "refrence"], Code.UNKNOWN_ENGINE, "onnxruntime, openvino, reference, vllm", "refrence"),
    "dtype": (["--dtype", "float8"], Code.BAD_OPTION, "float32, bfloat16, float16", "float8"),
    "device": (["--device", "tpu"], Code.BAD_OPTION, "cpu or cuda", "tpu"),
    "another device of torch": (["--device", "meta"], Code.BAD_OPTION, "cpu or cuda", "meta"),
    "a second CPU": (["--device", "cpu:1"], Code.NO_DEVICE, "cpu:0", "cpu:1"),
    "schedule": (["--schedule", "fancy"], Code.BAD_OPTION, "plain, chunked, batched, mixed", "fancy"),
    "one of several schedules": (["--schedule", "plain,fancy"], Code.BAD_OPTION, "plain, chunked", "fancy"),
    "chunk size": (["--schedule", "chunked:0"], Code.BAD_OPTION, "chunked:N", "chunked:0"),
    "chunk size of 5000 digits": (["--schedule", "chunked:" + "9" * 5000], Code.BAD_OPTION, "999999999", "chunked:99"),
    "schedule the engine cannot follow": (
        ["--engine", "hf", "--schedule", "mixed", "--token-ids", "1,4"], Code.ENGINE_CANNOT_SERVE,
        "plain, chunked, batched", "mixed",
    ),
    "engine option": (["--engine-option", "blocksize=4"], Code.BAD_OPTION, "block_size", "blocksize=4"),
    "engine option without a value": (["--engine-option", "block_size"], Code.BAD_OPTION, "NAME=VALUE", "block_size"),
    "engine option that is no number": (["--engine-option", "block_size=x"], Code.BAD_OPTION, "integer", "x"),
    "engine option out of range": (["--engine-option", "block_size=0"], Code.BAD_OPTION, "at least 1", "0"),
    "attention backend": (["--engine-option", "attention_backend=x"], Code.BAD_OPTION, "paged", "x"),
    "attention of hf": (["--engine", "hf", "--engine-option", "attention=x"], Code.BAD_OPTION, "sdpa or eager", "x"),
    "max new tokens": (["--max-new-tokens", "0"], Code.BAD_OPTION, "at least 1", "0"),
    "number": (["--max-new-tokens", "few"], Code.BAD_OPTION, "valid integer", "--max-new-tokens"),
    "token ids": (["--token-ids", "1,x"], Code.BAD_OPTION, "integers", "1,x"),
    "a comma too many": (["--token-ids", "1,,2"], Code.BAD_OPTION, "integers", "1,,2"),
    "unknown option": (["--modle", "x"], Code.BAD_OPTION, "No such option", "--modle"),
    "case": (["--case", "nowhere.toml"], Code.BAD_CASE, "no such case", "nowhere.toml"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "code", "expected", "actual"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_makes_no_sense(refused, llama, options, code, expected, actual):
    message = refused(code, "check", "--model", llama, "--token-ids", "1,4", "--max-new-tokens", "2", *options)
    assert expected in message
    assert actual in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(refused, llama):
    message = refused(Code.NO_DEVICE, "check", "--model", llama, *TOKENS, "--device", "cuda")
    assert "actual:   cuda" in message
    assert "try:      --device cpu" in message


CASES = {
    "no TOML": ("=", "case cannot be read"),
    "an unknown field": ("max_new_token = 3", "max_new_token"),
    "a wrong type": ('max_new_tokens = "3"', "max_new_tokens"),
    "an unknown schedule": ('schedules = ["fancy"]', "plain, chunked, batched, mixed"),
    "an unknown trigger": ('require = ["luck"]', "require"),
}


@pytest.mark.parametrize(("line", "value"), CASES.values(), ids=CASES)
def test_a_bad_case(refused, llama, tmp_path, line, value):
    case = tmp_path / "case.toml"
    case.write_text(f'schema_version = 1\nmodel = "{llama}"\n{line}\n[[requests]]\ntoken_ids = [1]\n')
    message = refused(Code.BAD_CASE, "check", "--case", case)
    assert str(case) in message
    assert value in message


# Recordings


@pytest.fixture
def damaged(recording: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recording, tmp_path / "damaged"))


def test_a_folder_that_is_no_recording(refused, golden, tmp_path):
    message = refused(Code.NOT_A_RECORDING, "diff", golden, tmp_path)
    assert "manifest.json" in message
    assert str(tmp_path) in message


def test_a_manifest_that_is_no_manifest(refused, golden, damaged):
    (damaged / "manifest.json").write_text('{"schema_version": 1}')
    assert str(damaged / "manifest.json") in refused(Code.BAD_MANIFEST, "diff", golden, damaged)


def test_another_schema(refused, golden, damaged):
    (damaged / "manifest.json").write_text('{"schema_version": 7}')
    assert "actual:   7" in refused(Code.UNKNOWN_SCHEMA, "diff", golden, damaged)


@pytest.mark.parametrize("side", ["expected", "actual"])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_a_damaged_step(refused, golden, recording, llama, tmp_path, side, with_model, damage):
    folder = Path(shutil.copytree(golden if side == "expected" else recording, tmp_path / "damaged"))
    step = sorted(folder.glob("step-*"))[:2][-1]  # a golden of a short workload has one
    content = step.read_bytes()
    if damage == "missing":
        code = Code.STEP_MISSING
        step.unlink()
    elif damage == "truncated":
        code = Code.STEP_TRUNCATED
        step.write_bytes(content[:-100])
    else:
        code = Code.STEP_ALTERED
        step.write_bytes(content[:-4] + bytes([*content[-4:-1], content[-1] ^ 1]))
    pair = (folder, recording) if side == "expected" else (golden, folder)
    message = refused(code, "diff", *pair, *(["--model", llama] if with_model else []))
    assert str(step) in message
    if damage == "truncated":
        assert str(len(content)) in message
        assert str(len(content) - 100) in message


def test_recordings_of_different_prompts(refused, golden, llama, tmp_path):
    tokens = ["--token-ids", "1,4,5,6,7,9", "--token-ids", "1,9,10", "--max-new-tokens", "3"]
    refused_nothing = ["record", "--model", llama, *tokens, "--out", tmp_path / "other"]
    assert cli_status(refused_nothing) == 0
    message = refused(Code.DIFFERENT_PROMPTS, "diff", golden, tmp_path / "other")
    assert "request 0 holds different tokens" in message
    assert "position 5" in message
    assert "expected: token 8" in message
    assert "actual:   token 9" in message


def test_recordings_of_different_requests(refused, golden, llama, tmp_path):
    assert cli_status(["record", "--model", llama, *TOKENS[:4], "--out", tmp_path / "other"]) == 0
    message = refused(Code.DIFFERENT_PROMPTS, "diff", golden, tmp_path / "other")
    assert "requests [0, 1]" in message
    assert "requests [0]" in message


def cli_status(arguments: list[object]) -> int:
    from harness.cli.main import run

    return run([str(argument) for argument in arguments])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("with_model", [False, True])
def test_what_is_not_finite_in_the_actual_is_a_mismatch(harness, golden, damaged, llama, value, with_model):
    rewrite(damaged, lambda tensors: tensors[TAP][2].fill_(value))
    ran = harness("diff", golden, damaged, *(["--model", llama] if with_model else []), "--format", "json")
    assert ran.status == 1, ran.err
    findings = [finding for finding in ran.json["findings"] if finding["code"] == Code.NOT_FINITE]
    assert (findings[0]["tap"], findings[0]["request"], findings[0]["position"]) == (TAP, 0, 2)
    assert ran.json["first_divergence"]["tap"] == TAP
    (tap,) = [tap for tap in ran.json["taps"] if tap["name"] == TAP]
    assert tap["num_nan"] + tap["num_inf"] == 192


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_model", [False, True])
def test_what_is_not_finite_in_the_expected_is_a_mismatch(
    harness, golden, recording, llama, tmp_path, value, with_model
):
    folder = Path(shutil.copytree(golden, tmp_path / "golden"))
    rewrite(folder, lambda tensors: tensors[TAP][2].fill_(value))
    ran = harness("diff", folder, recording, *(["--model", llama] if with_model else []), "--format", "json")
    assert ran.status == 1, ran.err
    findings = [finding for finding in ran.json["findings"] if finding["code"] == Code.ORACLE_NOT_FINITE]
    assert (findings[0]["tap"], findings[0]["request"], findings[0]["position"]) == (TAP, 0, 2)


def test_not_finite_in_both_is_no_agreement(harness, golden, damaged, tmp_path):
    folder = Path(shutil.copytree(golden, tmp_path / "golden"))
    for side in (folder, damaged):
        rewrite(side, lambda tensors: tensors[TAP][2].fill_(float("nan")))
    ran = harness("diff", folder, damaged, "--format", "json")
    assert ran.status == 1, ran.err
    assert {Code.NOT_FINITE, Code.ORACLE_NOT_FINITE} <= {finding["code"] for finding in ran.json["findings"]}


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors[TAP] = tensors[TAP][:, :96].contiguous()


def coarsen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[TAP] = tensors[TAP].to(torch.bfloat16)


@pytest.mark.parametrize(("change", "words"), [(halve, ("[192]", "[96]")), (coarsen, ("BF16", "float32"))])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_tap_of_another_shape_or_dtype_is_a_mismatch(harness, golden, damaged, llama, change, words, with_model):
    for step in range(len(list(damaged.glob("step-*")))):
        path = damaged / f"step-{step:05d}.safetensors"
        if TAP in safetensors.torch.load(path.read_bytes()):
            rewrite(damaged, change, step=step)
    ran = harness("diff", golden, damaged, *(["--model", llama] if with_model else []), "--format", "json")
    assert ran.status == 1, ran.err
    (finding,) = [finding for finding in ran.json["findings"] if finding["code"] == Code.TAP_MISMATCH]
    assert finding["tap"] == TAP
    assert all(word in finding["message"] for word in words)


def test_a_glob_that_matches_no_tap(refused, golden, recording):
    assert "--taps" in refused(Code.BAD_OPTION, "diff", golden, recording, "--taps", "model.layer.*")


def test_an_unknown_trigger(refused, golden, recording):
    assert "decode, chunked_prefill" in refused(Code.BAD_OPTION, "diff", golden, recording, "--require", "luck")


def test_a_golden_together_with_what_it_says(refused, golden, tmp_path):
    arguments = ["record", "--golden", golden, "--max-new-tokens", "4", "--out", tmp_path / "out"]
    assert "--max-new-tokens" in refused(Code.BAD_OPTION, *arguments)


def test_two_schedules_for_one_recording(refused, golden, tmp_path):
    arguments = ["record", "--golden", golden, "--schedule", "plain,batched", "--out", tmp_path / "out"]
    assert "plain,batched" in refused(Code.BAD_OPTION, *arguments)
    assert not (tmp_path / "out").exists()


# Output


@pytest.fixture(params=["check", "golden", "record"])
def writing_command(request, llama, golden) -> list[object]:
    """Return a command that writes to the folder that follows."""
    if request.param == "record":
        return ["record", "--golden", golden, "--out"]
    return [request.param, "--model", llama, *(TOKENS if request.param == "check" else TOKENS[:4]), "--out"]


def test_an_output_folder_that_exists_is_left_alone(refused, writing_command, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("ten years")
    assert str(folder) in refused(Code.OUTPUT_EXISTS, *writing_command, folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert (folder / "thesis.txt").read_text() == "ten years"


def test_a_file_in_the_output_folders_place_is_left_alone(refused, writing_command, tmp_path):
    (tmp_path / "out").write_text("ten years")
    assert "is a file" in refused(Code.OUTPUT_EXISTS, *writing_command, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "ten years"


@pytest.mark.parametrize("folder", ["/proc/harness/out", "/dev/full/out", "/dev/null/out"])
def test_an_output_folder_that_cannot_be_made(refused, writing_command, folder):
    assert folder in refused(Code.CANNOT_WRITE, *writing_command, folder)


def test_a_read_only_output_folder(refused, writing_command, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    access = os.access  # root may write anywhere but on a read-only mount
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert "read-only" in refused(Code.CANNOT_WRITE, *writing_command, tmp_path / "out")


def test_a_failure_leaves_no_output_folder_behind(refused, llama, tmp_path):
    arguments = ["--model", llama, "--token-ids", "1,999", "--max-new-tokens", "2", "--out", tmp_path / "out"]
    for command in ("check", "golden", "record"):
        refused(Code.TOKEN_OUTSIDE_VOCABULARY, command, *arguments)
        assert not (tmp_path / "out").exists()


def test_a_cache_that_cannot_be_written(refused, llama, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", "/proc/harness")
    assert "HARNESS_CACHE" in refused(Code.CANNOT_WRITE, "check", "--model", llama, *TOKENS)


# Engines of others


FAILING = {
    "in a run": ("self.inner.run(workload, Between(writer))", "raise MemoryError('17 GiB')", "MemoryError: 17 GiB"),
    "by ending the process": ("self.inner.run(workload, Between(writer))", "raise SystemExit(0)", "SystemExit: 0"),
    "after some steps": (
        "self.inner.run(workload, Between(writer))",
        "self.inner.run(workload, Between(writer)); 1 / 0",
        "ZeroDivisionError: division by zero",
    ),
    "at opening": ("    return Engine(", "    raise OSError('no driver')\n    return Engine(", "OSError: no driver"),
    "by being none": (
        "    return Engine(",
        "    return dict(a=",
        "expected: an object with name, capabilities and run",
    ),
    "at import": ("class Between:", "raise ImportError('no libfoo.so')\nclass Between:", "no libfoo.so"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("old", "new", "words"), FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("command", ["check", "record"])
def test_an_engine_that_fails(refused, install, llama, golden, tmp_path, old, new, words, command):
    engine = install(ENGINE.replace(old, new))
    out = tmp_path / "out"
    start = ["check", "--model", llama, *TOKENS] if command == "check" else ["record", "--golden", golden]
    message = refused(Code.ENGINE_FAILED, *start, "--engine", engine, "--out", out)
    assert words in message
    assert not out.exists()


def test_an_engine_that_misuses_the_recorder(refused, install, llama, tmp_path):
    engine = install(ENGINE.replace("self.inner.run(workload, Between(writer))", "writer.tap('lm_head', None)"))
    refused(Code.BAD_RECORDER_CALL, "check", "--model", llama, *TOKENS, "--engine", engine, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
