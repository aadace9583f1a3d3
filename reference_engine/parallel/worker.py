"""The processes of a tensor-parallel engine besides the first: they do what rank 0 tells them, step by step.

The scheduler, the pool and the sampler are rank 0's alone, so the ranks cannot disagree about which block is whose.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.engine import LLMEngine
from reference_engine.model_runner import ModelRunner
from reference_engine.parallel.messages import Command, decode_chunks
from reference_engine.parallel.ranks import Ranks

__all__ = ["parallel_engine", "serve"]

GRACE_S = 20
"""Seconds that a worker has to end by itself."""


@torch.no_grad()
def serve(model_dir: str | Path, config: EngineConfig, ranks: Ranks) -> None:
    """Follow rank 0 until it tells `Command.STOP`.

    Raises:
        RankError: rank 0 has ended without a message.
    """
    runner = ModelRunner(model_dir, config, ModelConfig.from_folder(model_dir), ranks)
    parts = ranks.watching(None)
    while True:
        command, *numbers = ranks.receive()
        if command == Command.STOP:
            return
        if command == Command.STEP:
            is_observed, *told = numbers
            runner.forward(runner.batch(decode_chunks(told), parts if is_observed else None))
        elif command == Command.COPY_BLOCK:
            assert runner.backend.cache is not None, "rank 0 has told a copy of its own"
            runner.backend.cache.copy_block(*numbers)
        else:
            (chunk,) = decode_chunks(numbers)
            runner.show_cache(chunk.sequence, parts)


@contextmanager
def parallel_engine(model_dir: str | Path, config: EngineConfig, size: int) -> Iterator[LLMEngine]:
    """Start the other ranks on this machine, and yield the engine of rank 0.

    Raises:
        ConfigError, CheckpointError, DeviceError: as `LLMEngine`.
        RankError: a rank has ended.
    """
    ModelConfig.from_folder(model_dir).shard(size)  # what does not divide is said before anything is started
    address = f"127.0.0.1:{_free_port()}"
    arguments = [str(model_dir), json.dumps(asdict(config)), address, str(size)]
    module = [sys.executable, "-m", "reference_engine.parallel.worker"]
    workers = [subprocess.Popen([*module, *arguments, str(rank)]) for rank in range(1, size)]
    ranks: Ranks | None = None
    try:
        ranks = Ranks.join(address, 0, size, config.device)
        with LLMEngine(model_dir, config, ranks=ranks) as engine:
            yield engine
        ranks.broadcast([Command.STOP])
        for worker in workers:
            worker.wait(GRACE_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        if ranks is not None:  # afterwards: what still waits for a worker that hangs would never leave
            ranks.leave()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def main(model_dir: str, config: str, address: str, size: str, rank: str) -> None:
    """Join the others and serve."""
    options = EngineConfig(**json.loads(config))
    ranks = Ranks.join(address, int(rank), int(size), options.device)
    try:
        serve(model_dir, options, ranks)
    finally:
        ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
