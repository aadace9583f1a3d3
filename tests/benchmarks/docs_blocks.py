"""Run every shell and Python block of README.md and docs/*.md as a reader would, and print how each one ended.

    git clone . FOLDER && python3 -m venv ENV && (cd FOLDER && ENV/bin/pip install -e '.[test]')
    ENV/bin/python -m tests.benchmarks.docs_blocks --clone FOLDER [--model CHECKPOINT] [--only PAGE ...]

ENV is the interpreter that the blocks get. Each page begins in FOLDER as it was cloned. The programs of a page are
written first; then its blocks run in their order, a command at a time, each with a limit of time. Blocks of the
language `py` are parts of a program, and are not run. What a reader has to fill in is filled in from `VALUES`; what
does not run here stands in `NOT_RUN`, with its reason. Prints Markdown; `--json` keeps all of it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

PORT = 8000
BLOCK = re.compile(r"^ *```(?P<language>\w+)(?: title=(?P<title>\S+))?\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)

VALUES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("PATH_OR_HUB_ID", "{model}"),
        ("--model PATH", "--model {model}"),
        ('--prompt "..."', '--prompt "Once upon a time, there was a little girl who liked to walk in the green park"'),
        ("path/to/checkpoint", "cases/checkpoints/qwen3-tiny"),
        ("path/to/adapter", "{made}/adapter"),
        ("BASE", "{model}"),
        ("ADAPTER", "{made}/adapter"),
        ("MERGED", "{made}/merged"),
        (" URL ", f" http://localhost:{PORT} "),
        ("model.gguf", "{made}/model.gguf"),
        ("models/qwen", "{made}/qwen"),
    ],
    "README": [("inspect PATH", "inspect {model}"), ("&& pytest", "&& pytest --collect-only -q")],
    "benchmarks": [("--engine yours", "--engine hf")],
    "endpoints": [
        ("{model}", "qwen3-tiny"), ("--dtype bfloat16", "--dtype float32"), ("served-model NAME", "served-model poems"),
        ("{made}/adapter", "{made}/adapter-of-qwen3"),
    ],
    "estimate": [("meta-llama/Meta-Llama-3-8B", "config.json"), ("config.json", "{made}/config.json")],
    "gates": [("git fetch", "rm -r out && git fetch")],  # a job of CI has a checkout of its own
    "fuzz": [("--engine mine", "--engine hf"), ("--seconds 600", "--seconds 30"), ("--seconds 120", "--seconds 30")],
    "llamacpp": [("path/to/original", "{model}")],
    "load": [(f"127.0.0.1:{PORT}", f"localhost:{PORT}"), ("64..512", "64..256")],
    "profiling": [
        ("FILE ", "prompts.txt "), ("requests.jsonl", "{made}/requests.jsonl"),
        ("summary trace.json.gz", "summary {made}/trace.json.gz"),
        ("before.pickle", "out/profile/memory/reference-prefill-r0.pickle"),
        ("after.pickle", "out/profile/memory/reference-decode-r0.pickle"),
    ],
    "quant": [
        ("path/to/original", "{made}/original"), ("model-Q4_K_M.gguf", "{made}/tiny.gguf"),
        ("path/to/model-AWQ", "{made}/quantised"),
    ],
    "quantised-checkpoints": [("path/to/quantised", "{made}/quantised")],
    "rollouts": [
        ("rollouts.jsonl --model {model}", "{made}/rollouts.jsonl --model llama-tiny"),
        ("gap.jsonl", "{made}/gap.jsonl"), (" A B [--before OLD]", " {model} {made}/merged"),
    ],
    "sampler": [("--dtype bfloat16", "--dtype float32")],
    "scale": [
        ("cases/ --matrix nightly.toml", "few --matrix nightly.toml"), ("--jobs 8", "--jobs 1"),
        ("yesterday", "all"), ("history nights/", "history all nightly"),
    ],
    "serve": [("--port 8000", f"--port {PORT}"), ("path/to/other", "{made}/adapter")],
    "test-your-attention": [("NAME --engine-model PATH", "hf --engine-model cases/checkpoints/qwen3-tiny")],
    "tokens": [("{model}", "{made}/chat")],
    "traces": [
        ("runs/42/", "out/profile/trace"), ("trace.json.gz", "out/profile/trace/reference-decode-r0.*.json.gz"),
        ("trace.json ", "out/profile/trace/reference-decode-r0.*.json.gz "),
        ("before.json.gz", "out/profile/trace/reference-prefill-r0.*.json.gz"),
        ("after.json.gz", "out/profile/trace/reference-decode-r0.*.json.gz"),
    ],
}  # fmt: skip
"""What a reader fills in, by page; those of "" on every page, first."""

IN_ANOTHER_ORDER = ("check-a-folder-of-tensors",)
"""Pages whose first block is a command on what the second one writes."""

BEFORE = {
    "gates": ["git branch -f main"],
    "profiling": ["echo 'Once upon a time' > prompts.txt"],
    "scale": ["mkdir few", "cp cases/qwen3-float32.toml cases/llama-token-ids.toml few",
              "ln -s ../cases/checkpoints few",
              "printf 'schema_version = 1\\nschedule = [\"plain\", \"batched\"]\\n' > nightly.toml"],
    "traces": ["harness profile --out out/profile"],
    "write-an-adapter": ["harness new-adapter mine --out mine", "pip install -q -e mine"],
}  # fmt: skip
"""What a page takes for granted."""

SERVERS = {
    "endpoints": ["--model", "qwen3-tiny", "--lora", "poems={made}/adapter-of-qwen3"],
    "load": ["--model", "{model}"],
    "sampler": ["--model", "{model}"],
    "tokens": ["--model", "{made}/chat"],
}
"""Options of the `reference-engine serve` that a page's commands ask."""

EXPECTED = {
    ("check-onnxruntime", "harness check"): 1,
    ("faults", "--check wrong-block"): 1,
    ("fuzz", "--fault copy-on-write-forgotten"): 1,
    ("fuzz", "poison --engine hf"): 1,
    ("gates", "--against"): 2,
    ("rollouts", "harness inspect"): 1,
    ("test-your-attention", "my_attention:attend"): 2,
    ("test-your-attention", "my_engine:Engine"): 2,
    ("test-your-engine", "pytest"): 1,
    ("test-your-scheduler", "--allow"): 0,
    ("test-your-scheduler", "pytest"): 1,
    ("test-your-state-cache", "pytest"): 1,
}
"""Exit statuses that are not 0: a difference that a page shows (2 where `pytest -x` stops its workers at the first),
checkpoints that differ, a clone without a change. The first that fits counts."""

NOT_RUN = [
    ("README", "harness faults", "run on the page faults"),
    ("", "cuda", "needs a GPU"),
    ("", "vllm", "needs the extra vllm: 3.5 GB"),
    ("check-your-vllm", "", "needs the extra vllm: 3.5 GB"),
    ("llamacpp", "pip install", "builds llama.cpp, some twenty minutes"),
    ("benchmarks", "CMAKE_ARGS", "builds llama.cpp, some twenty minutes"),
    ("benchmarks", "--peer llamacpp", "needs that build"),
    ("models", "python -m tests.families.check", "every decoder of transformers: hours"),
    ("", "--engine llamacpp", "needs the extra llamacpp"),
    ("quant", "", "needs the extras llamacpp and quant"),
    ("quantised-checkpoints", "--engine hf", "needs the package of the format, here gptqmodel"),
    ("structured-output", "block-2", "needs xgrammar, which is in no extra"),
    ("rollout-faults", "--engine vllm", "needs the extra vllm: 3.5 GB"),
    ("scale", "--ray", "needs a Ray cluster and a store in a cloud"),
    ("scale", "bisect", "needs another engine's repository"),
    ("pytest", "--golden-update", "rewrites the project's own sketches"),
]
"""Page, a part of the command, reason."""


@dataclass(frozen=True)
class Ended:
    """How a command or a program ended: an exit status, or the reason why it was not run."""

    page: str
    block: int
    what: str
    status: int | None
    expected: int
    seconds: float
    reason: str
    output: str


def filled_in(page: str, text: str, options: argparse.Namespace) -> str:
    """Return a block with the reader's values in the place of its placeholders."""
    for old, new in [*VALUES[""], *VALUES.get(page, [])]:
        text = text.replace(old, new)
    return text.replace("{model}", options.model).replace("{made}", str(options.made))


def run(command: str, folder: Path, seconds: float) -> tuple[int, float, str]:
    """Run a command; return its exit status (124: over its limit of time), seconds, and the end of its output."""
    begin = time.monotonic()
    shown = folder.parent / "output.txt"
    with shown.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = 124
    return status, time.monotonic() - begin, shown.read_text(errors="replace")[-3000:]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a reader in the environment of this interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    added = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "COLUMNS": "100"}
    if "fused_engine" in "".join(path.read_text() for path in folder.glob("block-*.py")):
        added["PYTHONPATH"] = str(folder / "tests" / "examples")
    return kept | added | {"HARNESS_CACHE": str(folder.parent / "cache")}


@contextmanager
def server(arguments: list[str], folder: Path) -> Iterator[None]:
    """Serve until the end of the block, once the server answers."""
    with (folder.parent / "server.txt").open("w") as out:
        process = subprocess.Popen(
            ["reference-engine", "serve", "--port", str(PORT), *arguments],
            cwd=folder,
            env=environment(folder),
            stdout=out,
            stderr=out,
        )
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit(f"the server ended: {(folder.parent / 'server.txt').read_text()}") from None
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def blocks(page: Path) -> list[re.Match[str]]:
    """Return the shell and Python blocks of a page."""
    matches = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [item for item in matches if item["language"] in ("sh", "bash", "python", "cpp")]


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, without their comments."""
    joined = re.sub(r"\\\n *", "", text)
    return [line for line in (re.sub(r"(^|\s{2,})#.*", "", item).strip() for item in joined.splitlines()) if line]


def work_of(page: Path, options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Write a page's programs below the clone, and yield the commands with the number of their block."""
    for number, block in enumerate(blocks(page), 1):
        text = filled_in(page.stem, block["text"], options)
        if block["language"] in ("sh", "bash"):
            yield from ((number, command) for command in commands(text))
            continue
        name = block["title"] or f"block-{number}.{block['language'].removesuffix('thon')}"
        (options.clone / name).parent.mkdir(exist_ok=True)
        (options.clone / name).write_text(text, encoding="utf-8")
        shell = f"{'pytest -n0' if name.startswith('test_') else 'python'} {name}"
        yield number, program(page.stem, name, shell)


def program(page: str, name: str, shell: str) -> str:
    """Return the command that runs a page's program, as the page's text says."""
    if page == "recording-format":
        return f"g++ -std=c++17 {name} && ./a.out made-by-cpp" if name.endswith("cpp") else f"{shell} made-by-python"
    if (page, name) == ("tensor-parallel", "block-3.py"):
        return f"torchrun --standalone --nproc-per-node 2 {name}"
    return shell


def ended(page: Path, options: argparse.Namespace) -> Iterator[Ended]:
    """Run a page, and yield how each of its commands ended."""
    for undo in (["checkout", "-q", "."], ["clean", "-fdxq"]):
        subprocess.run(["git", *undo], cwd=options.clone, check=True)
    work = list(work_of(page, options))
    if page.stem in IN_ANOTHER_ORDER:
        work.reverse()
    for command in BEFORE.get(page.stem, []):
        status, _, output = run(command, options.clone, options.seconds)
        if status:
            raise SystemExit(f"{page.stem}: {command}: {status}\n{output}")
    with ExitStack() as running:
        if page.stem in SERVERS:
            served = [filled_in("", item, options) for item in SERVERS[page.stem]]
            running.enter_context(server(served, options.clone))
        for number, command in work:
            yield one(page.stem, number, command, running, options)


def one(page: str, number: int, command: str, running: ExitStack, options: argparse.Namespace) -> Ended:
    """Run one command of a page."""
    expected = next(
        (status for (named_page, part), status in EXPECTED.items() if named_page == page and part in command), 0
    )
    for named_page, part, reason in NOT_RUN:
        if named_page in ("", page) and (part in command if page != "models" else command.endswith(part)):
            return Ended(page, number, command, None, expected, 0.0, reason, "")
    if command.startswith("reference-engine serve"):
        begin = time.monotonic()
        arguments = command.replace(f"--port {PORT}", "").split()[2:]
        running.close()
        running.enter_context(server(arguments, options.clone))
        return Ended(page, number, command, 0, 0, time.monotonic() - begin, "answered at /health", "")
    if command.startswith("tensorboard"):
        command = f"timeout --preserve-status -s INT 20 {command}"
    status, seconds, output = run(command, options.clone, options.seconds)
    return Ended(page, number, command, status, expected, seconds, "", output)


def make(folder: Path, model: Path) -> None:
    """Write what the pages take for granted: an adapter, a merge, a GGUF file, logs, a chat template."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig

    import harness
    from harness.extensions.llamacpp.gguf.writer import write_gguf
    from harness.formats.checkpoint import resolve

    from ..extensions.server.chat.tool_calls.conftest import write_family
    from ..quantised_checkpoints import write_quantised
    from ..unit.lora_adapter import write_adapter

    tiny = Path(resolve("llama-tiny"))
    shutil.copytree(tiny, folder / "original")
    write_adapter(folder / "adapter", seed=1, base=model)
    write_adapter(folder / "adapter-of-qwen3", seed=1)
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder / "adapter"
    )
    peft.merge_and_unload().save_pretrained(folder / "merged")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder / "merged")
    write_gguf(tiny, folder / "tiny.gguf")
    write_gguf(model, folder / "model.gguf")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.randn(64, 64) @ torch.randn(64, 64)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    write_quantised(tiny, folder / "quantised", "awq")
    write_family(folder / "qwen", "hermes")
    shutil.copytree(model, folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "requests.jsonl").write_text(
        '{"prompt_tokens": 16, "max_tokens": 8}\n{"prompt": "Once", "max_tokens": 4}\n'
    )
    llama = LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=8192)
    llama.architectures, llama.dtype = ["LlamaForCausalLM"], "bfloat16"
    llama.save_pretrained(folder)
    rows = list(sampled(tiny))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monitor = harness.RolloutMonitor(every=1, num_rows=4, history=folder / "gap.jsonl", dtype="float32")
    monitor.step(1, rows, model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32))


def sampled(model: Path) -> Iterator[dict[str, object]]:
    """Yield rollouts of the reference engine, whose trainer is as exact."""
    from reference_engine import EngineConfig, LLMEngine, SamplingParams

    from ..extensions.rollout.training import sampled_rows

    prompts = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 99, 98, 97]]
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=0, num_logprobs=0, ignore_eos=True)
    with LLMEngine(model, EngineConfig(dtype="float32", num_blocks=32)) as engine:
        for row in sampled_rows(engine, prompts, params):
            yield {**row, "trainer_logprobs": row["engine_logprobs"]}


def table(endings: list[Ended]) -> str:
    """Return a row for each page, and one for each command that ended otherwise than it should."""
    rows = []
    for page, item in groupby(endings, key=lambda ending: ending.page):
        entries = list(item)
        ran = [one for one in entries if one.status is not None]
        good = sum(one.status == one.expected for one in ran)
        reasons = dict.fromkeys(one.reason for one in entries if one.status is None)
        rows.append([page, len({one.block for one in entries}), len(entries), len(ran), good, "; ".join(reasons)])
    shown = tabulate(rows, ["page", "blocks", "commands", "run", "as they should", "not run"], tablefmt="github")
    wrong = [one for one in endings if one.status not in (None, one.expected)]
    lines = [f"- {one.page}, block {one.block}: `{one.what}` ended with {one.status}" for one in wrong]
    return "\n".join([shown, "", *lines])


def main() -> int:
    """Run the pages; 0 if every command ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.docs_blocks")
    parser.add_argument("--clone", type=Path, required=True)
    parser.add_argument("--model", default="cases/checkpoints/llama-tiny")
    parser.add_argument("--only", nargs="*", help="pages, without .md")
    parser.add_argument("--seconds", type=float, default=600, help="of one command, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.clone, options.model = options.clone.resolve(), str(Path(options.model).resolve())
    options.made = options.clone.parent / "made"
    if not options.made.is_dir():
        make(options.made, Path(options.model))
    endings = []
    for page in [options.clone / "README.md", *sorted((options.clone / "docs").glob("*.md"))]:
        if options.only and page.stem not in options.only:
            continue
        for ending in ended(page, options):
            endings.append(ending)
            print(
                f"{ending.page} {ending.block} [{ending.status}] {ending.seconds:.0f} s  {ending.what}",
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps([asdict(item) for item in endings], indent=1))
    print(table(endings))
    return 0 if all(ending.status in (None, ending.expected) for ending in endings) else 1


if __name__ == "__main__":
    sys.exit(main())
