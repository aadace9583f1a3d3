"""Measure what a check of a server costs beside the same prompts as plain requests, in turns.

    python tests/benchmarks/endpoint_cost.py [--model FOLDER] [--prompts 100] [--tokens 64] [--turns 3]

Without --model: a Qwen3 of random weights (hidden 512, 8 layers, vocabulary 8192). The server is `reference-engine
serve` in a separate process. All columns are seconds; `truth` runs beside the others, `own work` is the rest: loading
and judging.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from tabulate import tabulate

from harness.extensions.server.address import Address
from harness.extensions.server.check.result import EndpointResult
from harness.extensions.server.check.run import check_endpoint
from harness.formats.case import RequestSpec
from harness.plan import plan_request

CONCURRENCY = 8


def random_model(folder: Path) -> Path:
    """Write a Qwen3 of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, initializer_range=0.05,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


async def plain(url: str, prompts: list[list[int]], num_tokens: int) -> None:
    """Send the prompts as plain requests."""
    free = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            async with free:
                (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*map(one, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or random_model(Path(scratch) / "model")
        command = [sys.executable, "-m", "reference_engine", "serve", "--port", "0"]
        command += ["--model", str(folder), "--dtype", "float32", "--engine-option", "enable_prefix_caching=false"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            measure(server.stdout.readline().strip(), folder, options)
        finally:
            server.terminate()
            server.wait()


def measure(url: str, folder: Path, options: argparse.Namespace) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 200) for _ in range(draw.randrange(8, 48))] for _ in range(options.prompts)]
    requests = [RequestSpec(token_ids=prompt) for prompt in prompts]
    plan = plan_request(model=str(folder), dtype="float32", requests=requests, max_new_tokens=options.tokens)
    address, rows = Address(url=url, concurrency=CONCURRENCY, timeout_s=600), []
    asyncio.run(plain(url, prompts[:8], 8))  # warm
    for _ in range(options.turns):
        begin = time.perf_counter()
        asyncio.run(plain(url, prompts, options.tokens))
        plain_s = time.perf_counter() - begin
        for num_again in (0, 4):
            result = check_endpoint(plan, address, num_again=num_again)
            values = (plain_s, *parts(result), result.truth_s, result.all_s, result.all_s / plain_s)
            rows.append([num_again, *(f"{value:.2f}" for value in values), result.outcome])
            print(*rows[-1], flush=True)
    headers = ["again", "plain", "together", "probe, mixed", "alone", "own work", "truth", "all", "all / plain", ""]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


def parts(result: EndpointResult) -> list[float]:
    """Return the seconds of all prompts together, of the other requests, of these alone, and without any request."""
    seconds = {run.schedule: run.seconds for run in result.runs}
    together, alone = seconds["together"], seconds.get("alone", 0.0)
    return [together, result.server_s - together - alone, alone, result.all_s - result.server_s]


if __name__ == "__main__":
    main()
