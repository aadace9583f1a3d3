"""Files that a user brings: logs of training, snapshots, dumps, GGUF, quantised checkpoints, conversations, runs."""

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from harness.extensions.suite.report import SUITE_NAME, suite_json
from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult

from ..extensions.llamacpp.gguf.bytes_of import gguf_bytes
from ..extensions.rollout.test_cli_rollout import TERM, kept
from ..quantised_checkpoints import write_quantised
from ..unit.profiling.test_memory_summary import SNAPSHOT
from .mutate import Mutation, damaged, damaged_header, damaged_json
from .target import Target

_TOKEN_IDS = [1, 4, 5, 6, 7]
_ONE_STEP = ("--token-ids", ",".join(map(str, _TOKEN_IDS)), "--max-new-tokens", "1")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_ROLLOUT = {
    "prompt_ids": [1, 4, 5], "response_ids": [6, 7], "engine_logprobs": [-1.5, -2.5], "trainer_logprobs": [-1.4, -2.6],
    "temperature": 0.9, "top_p": 0.8, "weight_version": "3", "response_mask": [1, 1],
}  # fmt: skip


def write_user_files(folder: Path) -> None:
    """Write sound files of every kind beside the folder's `model`."""
    model = folder / "model"
    for kind in ("gptq", "nvfp4"):
        write_quantised(model, folder / kind, kind)
    shutil.copytree(model, folder / "talking")
    (folder / "talking" / "chat_template.jinja").write_text(_TEMPLATE)
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    (folder / "chat.json").write_text(json.dumps({"messages": talk}))
    (folder / "rollouts.jsonl").write_text(json.dumps(_ROLLOUT))
    (folder / "monitor.jsonl").write_text(kept(3, TERM))
    (folder / "requests.jsonl").write_text(json.dumps({"prompt_token_ids": _TOKEN_IDS, "max_tokens": 2, "at": 0.0}))
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    (folder / "model.gguf").write_bytes(_gguf())
    _dump(model, folder / "dump")
    (folder / "nights" / "one").mkdir(parents=True)
    (folder / "nights" / "one" / SUITE_NAME).write_text(json.dumps(suite_json(_night())))


def user_targets() -> list[Target]:
    """Return a target for each of the files."""
    text: Sequence[Mutation] = [damaged, damaged_json, damaged_json]
    header: Sequence[Mutation] = [damaged, damaged_header, damaged_header]
    targets = [
        Target(name="rollouts", file="rollouts.jsonl", mutations=text, seconds=1.0, command=lambda at: (
            "rollout", at / "rollouts.jsonl", "--model", at / "model")),
        Target(name="monitor's history", file="monitor.jsonl", mutations=text, command=lambda at: (
            "rollout", "--history", at / "monitor.jsonl")),
        Target(name="requests", file="requests.jsonl", mutations=text, seconds=1.0, command=lambda at: (
            "profile", "--model", at / "model", "--requests", at / "requests.jsonl", "--runs", "1", "--out",
            at / "out")),
        Target(name="snapshot", file="snapshot.pickle", mutations=[damaged], command=lambda at: (
            "trace", "memory", at / "snapshot.pickle")),
        Target(name="GGUF", file="model.gguf", mutations=[damaged], command=lambda at: ("inspect", at / "model.gguf")),
        Target(name="runs of a suite", file=f"nights/one/{SUITE_NAME}", mutations=text, command=lambda at: (
            "suite", "history", at / "nights")),
        Target(name="config of an estimate", file="model/config.json", mutations=text, seconds=0.3, command=lambda at: (
            "estimate", "--model", at / "model")),
        Target(name="compared weights", file="talking/model-00001-of-00002.safetensors", mutations=header,
               command=lambda at: ("inspect", at / "model", "--against", at / "talking")),
        Target(name="tensor in figures", file="talking/model-00001-of-00002.safetensors", mutations=header,
               command=lambda at: ("inspect", at / "talking", "--tensor", "model.embed_tokens.weight")),
        Target(name="conversation", file="chat.json", mutations=text, seconds=1.0, command=_talk),
        Target(name="chat template", file="talking/chat_template.jinja", mutations=[damaged], seconds=1.0,
               command=_talk),
        Target(name="dump in numpy", file="dump/logits.npy", mutations=[damaged], seconds=1.0, command=_judge_dump),
        Target(name="dump in torch", file="dump/hidden.pt", mutations=[damaged], seconds=1.0, command=_judge_dump),
    ]  # fmt: skip
    for kind in ("gptq", "nvfp4"):
        command = _golden_of(kind)
        targets += [
            Target(name=f"config of {kind}", file=f"{kind}/config.json", mutations=text, seconds=1.0, command=command),
            Target(name=f"weights in {kind}", file=f"{kind}/model.safetensors", mutations=header, seconds=1.0,
                   command=command),
        ]  # fmt: skip
    return targets


def _talk(at: Path) -> Sequence[object]:
    return (
        "golden",
        "--model",
        at / "talking",
        "--prompt-file",
        at / "chat.json",
        "--max-new-tokens",
        "1",
        "--out",
        at / "out",
    )


def _judge_dump(at: Path) -> Sequence[object]:
    return "check", "--model", at / "model", "--tensors", at / "dump", *_ONE_STEP


def _golden_of(kind: str) -> Callable[[Path], Sequence[object]]:
    return lambda at: ("golden", "--model", at / kind, *_ONE_STEP, "--out", at / "out")


def _gguf() -> bytes:
    """Return a file of a Llama of one layer, all of its weights zero."""
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 32,
        "llama.feed_forward_length": 32, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
        "llama.vocab_size": 8,
    }  # fmt: skip
    shapes = {"token_embd": [8, 32], "output_norm": [32], "output": [8, 32]}
    shapes |= {f"blk.0.{name}_norm": [32] for name in ("attn", "ffn")}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": [32, 32] for name in names}
    ends = [*accumulate(4 * prod(shape) for shape in shapes.values())]
    tensors = [
        (f"{name}.weight", shape, 0, end - 4 * prod(shape))
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    ]
    return gguf_bytes(metadata, tensors, bytes(ends[-1]))


def _dump(model: Path, folder: Path) -> None:
    """Write what a forward of the model computes, in two files."""
    folder.mkdir()
    loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False, dtype=torch.float32)
    with torch.no_grad():
        made = loaded(torch.tensor([_TOKEN_IDS]), output_hidden_states=True)
    np.save(folder / "logits.npy", made.logits[0].numpy())
    torch.save({f"hidden.{at}": state[0] for at, state in enumerate(made.hidden_states)}, folder / "hidden.pt")


def _night() -> SuiteResult:
    case = CaseResult(name="a[x]", verdict=CaseVerdict.PASS, labels={"case": "a"}, seconds=1.0)
    return SuiteResult(cases=(case,), label="v1", begun_at="2026-11-24T00:00:00+00:00")
