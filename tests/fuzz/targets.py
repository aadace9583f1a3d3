"""What is damaged, and the command that is given the damaged file."""

import gzip
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from harness.cli.main import run
from harness.oracle.golden import INFO_FILE, NOISE_FILE, GoldenInfo

from ..unit.lora_adapter import write_adapter
from .mutate import Mutation, damaged, damaged_header, damaged_json
from .target import CHECKPOINTS, WORKLOAD, Target, cache_at
from .user_files import user_targets, write_user_files

_SMALL_PROFILE = ("--prompt-tokens", "4", "--max-new-tokens", "2", "--runs", "1")


class Templates:
    """Sound inputs, made once: a checkpoint in shards, a golden, a recording, a profile with a baseline, a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(CHECKPOINTS / "qwen2-tiny", folder / "model")
        self._run("golden", "--model", folder / "model", *WORKLOAD, "--out", folder / "golden")
        self._run("record", "--golden", folder / "golden", "--schedule", "batched", "--out", folder / "recording")
        with cache_at(folder / "cache"):
            self._run("check", "--model", folder / "model", "--schedule", "plain", *WORKLOAD)
        self._run("profile", "--model", folder / "model", *_SMALL_PROFILE, "--out", folder / "profile")
        self._run("gate", folder / "profile", folder / "baseline.json", "--accept")
        trace = next((folder / "profile").rglob("*.trace.json.gz"))
        shutil.copy(trace, folder / "trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))
        events["traceEvents"] = events["traceEvents"][:200]  # damage shows in few as in many
        (folder / "trace.json").write_text(json.dumps(events))
        write_adapter(folder / "lora", seed=1, base=folder / "model")
        place = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "s": "t"}
        sizes = [{"Addr": 2**63 + at, "Bytes": 8, "Device Type": 0, "Device Id": -1} for at in range(4)]
        memory = [{**place, "ts": 2 + at, "args": args} for at, args in enumerate(sizes)]
        operator = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 9, "args": {}}
        (folder / "memory.json").write_text(json.dumps({"traceEvents": [operator, *memory]}))
        write_user_files(folder)
        (folder / "case.toml").write_text(
            'schema_version = 1\ndescription = "a case"\nmodel = "model"\nengine = "reference"\ndtype = "float32"\n'
            'schedules = ["plain", "chunked:3"]\nmax_new_tokens = 4\nrequire = ["decode"]\nisolate = false\n'
            '[engine_options]\nblock_size = 4\n[[requests]]\ntoken_ids = [1, 2, 3, 4, 5]\n[[requests]]\nprompt = "ab"\n'
            "[profile]\nprompt_tokens = 8\n",
            encoding="utf-8",
        )

    @staticmethod
    def _run(*arguments: object) -> None:
        """Run a command; a baseline is accepted on a machine of CI, too: it is the template's own."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err, patch.dict(os.environ):
            os.environ.pop("CI", None)
            status = run([str(argument) for argument in arguments])
        assert status == 0, (arguments, status, err.getvalue())


def targets(templates: Templates) -> list[Target]:
    """Return all targets."""
    text, header = [damaged, damaged_json, damaged_json], [damaged, damaged_header, damaged_header]
    fixed = [
        Target(name="index", file="model/model.safetensors.index.json", mutations=text, command=_inspect),
        Target(name="config", file="model/config.json", mutations=text, command=_inspect),
        Target(name="weights", file="model/model-00001-of-00002.safetensors", mutations=header, command=_inspect),
        Target(name="case", file="case.toml", mutations=[damaged], sound="2 H016",
            command=lambda at: ("check", "--case", at / "case.toml", "--device", "cuda:99")),
        Target(name="trace", file="trace.json", mutations=text, command=lambda at: (
            "trace", "diff", at / "trace.json", at / "trace.json")),
        Target(name="gzipped trace", file="trace.json.gz", mutations=[damaged], command=lambda at: (
            "trace", "summary", at / "trace.json.gz")),
        Target(name="profile", file="profile/profile.json", mutations=text, command=_gate),
        Target(name="baseline", file="baseline.json", mutations=text, command=_gate),
        Target(name="recording's manifest", file="recording/manifest.json", mutations=text, command=_diff),
        Target(name="golden's manifest", file="golden/manifest.json", mutations=text, command=_diff, repair=_forget),
        Target(name="golden.json", file=f"golden/{INFO_FILE}", mutations=text, command=_diff, repair=_sign_info),
        Target(name="noise", file=f"golden/{NOISE_FILE}", mutations=header, command=_diff, repair=_forget),
    ]  # fmt: skip
    for side in ("recording", "golden"):
        step = f"{side}/step-00000.safetensors"
        fixed.append(Target(name=f"{side}'s step", file=step, mutations=header, command=_diff, repair=_sign))
    fixed += [
        Target(name="memory trace", file="memory.json", mutations=text, command=lambda at: (
            "trace", "summary", at / "memory.json")),
        Target(name="adapter's config", file="lora/adapter_config.json", mutations=text, seconds=1.0, command=_adapted),
        Target(name="adapter", file="lora/adapter_model.safetensors", mutations=header, seconds=1.0, command=_adapted),
    ]  # fmt: skip
    return [*fixed, *user_targets(), *_of_a_golden(templates, text), *_in_the_cache(templates, text, header)]


def _of_a_golden(templates: Templates, mutations: Sequence[Mutation]) -> Iterator[Target]:
    """Yield what transformers reads of a checkpoint."""
    files = {"config.json": WORKLOAD, "generation_config.json": WORKLOAD}
    files |= dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), ("--prompt", "ab", "--max-new-tokens", "2"))
    for file, workload in files.items():
        if (templates.folder / "model" / file).exists():
            yield Target(
                name=f"{file} of a golden", file=f"model/{file}", mutations=mutations, seconds=1.0,
                command=lambda at, workload=workload: (
                    "golden", "--model", at / "model", *workload, "--out", at / "out"),
            )  # fmt: skip


def _in_the_cache(templates: Templates, text: Sequence[Mutation], header: Sequence[Mutation]) -> Iterator[Target]:
    """Yield the files of a golden that a check finds in the cache; a plain one has no noise."""
    names = {path.name for path in templates.folder.glob("cache/goldens/*/*")}
    for file in sorted(names & {"manifest.json", INFO_FILE, NOISE_FILE, "step-00000.safetensors"}):
        yield Target(
            name=f"{file} in the cache", file=f"cache/goldens/*/{file}", seconds=1.0,
            mutations=header if file.endswith("safetensors") else text,
            command=lambda at: ("check", "--model", at / "model", "--schedule", "plain", *WORKLOAD),
        )  # fmt: skip


def _adapted(at: Path) -> Sequence[object]:
    return "golden", "--model", at / "model", *WORKLOAD, "--lora", at / "lora", "--out", at / "out"


def _inspect(at: Path) -> Sequence[object]:
    return "inspect", at / "model"


def _gate(at: Path) -> Sequence[object]:
    return "gate", at / "profile", at / "baseline.json"


def _diff(at: Path) -> Sequence[object]:
    return "diff", at / "golden", at / "recording"


def _sign(folder: Path) -> None:
    """Write the size and digest of the damaged step into its manifest, as a program that wrote it so would have."""
    for side in ("recording", "golden"):
        manifest = json.loads((folder / side / "manifest.json").read_text())
        (folder / side / "manifest.json").unlink()  # a link to the template's
        content = (folder / side / manifest["steps"][0]["file"]).read_bytes()
        manifest["steps"][0] |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / side / "manifest.json").write_text(json.dumps(manifest))
    _forget(folder)


def _forget(folder: Path) -> None:
    """Make of the golden one of the first version, which had no digests."""
    (folder / "golden" / INFO_FILE).unlink()


def _sign_info(folder: Path) -> None:
    path = folder / "golden" / INFO_FILE
    with suppress(ValueError):
        info = GoldenInfo.model_validate_json(path.read_bytes())
        path.write_text(info.model_copy(update={"sha256": info.digest()}).model_dump_json())
