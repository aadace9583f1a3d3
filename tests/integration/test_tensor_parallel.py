"""Two processes on the loopback address: the same tokens, the same rows, and an end when one of them ends."""

import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import reference_engine.parallel.ranks
import reference_engine.parallel.worker
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome
from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.errors import ConfigError, RankError
from reference_engine.parallel.worker import parallel_engine

PROMPTS = [list(range(10, 31)), [5, 6, 7]]
PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)
SECONDS = 600
"""More than any of this takes, and less than any timeout of torch's."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("qwen2-tiny", "float32"), ("llama-tiny", "bfloat16")])
def test_every_row_is_that_of_the_oracle(checkpoints: Path, model: str, dtype: str) -> None:
    plan = plan_request(
        model=str(checkpoints / model), engine="reference", dtype=dtype, device="cpu",
        requests=[RequestSpec(token_ids=prompt) for prompt in PROMPTS], max_new_tokens=4, schedules=["tensor-parallel"],
    )  # fmt: skip
    (run,) = run_check(plan).runs
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert run.coverage.missing == 0


@pytest.mark.slow
def test_forks_and_tokens_are_those_of_one_rank(checkpoints: Path) -> None:
    config = EngineConfig(dtype="float32", block_size=4)

    def tokens(engine: LLMEngine) -> list[list[int]]:
        first = engine.add_request(PROMPTS[0], PARAMS)
        engine.step()
        engine.fork(first, SamplingParams(max_new_tokens=5, forced_token_ids=[1, 2, 3, 4], ignore_eos=True))
        made: dict[int, list[int]] = {}
        while engine.has_unfinished():
            for output in engine.step():
                made.setdefault(output.request_id, []).append(output.sampled_token_id)
        return list(made.values())

    folder = checkpoints / "qwen3-tiny"
    expected = tokens(LLMEngine(folder, config))
    with parallel_engine(folder, config, 2) as engine:
        assert tokens(engine) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "stop",
    [subprocess.Popen.kill, lambda worker: worker.send_signal(signal.SIGSTOP)],
    ids=["it has ended", "it hangs"],
)
def test_when_a_rank_does_not_answer_the_others_end(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, stop: "Callable[[subprocess.Popen[bytes]], None]"
) -> None:
    monkeypatch.setattr(reference_engine.parallel.ranks, "ANSWER_LIMIT", timedelta(seconds=1))
    workers: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def starting(*args: object, **kwargs: object) -> "subprocess.Popen[bytes]":
        workers.append(start(*args, **kwargs))  # type: ignore[call-overload]
        return workers[-1]

    monkeypatch.setattr(reference_engine.parallel.worker.subprocess, "Popen", starting)

    def run_and_lose_one() -> None:
        with parallel_engine(checkpoints / "qwen3-tiny", EngineConfig(), 2) as engine:
            engine.add_request(PROMPTS[0], PARAMS)
            engine.step()
            stop(workers[0])
            while engine.has_unfinished():
                engine.step()

    begin = time.monotonic()
    with pytest.raises(RankError, match="lost each other"):
        run_and_lose_one()
    assert time.monotonic() - begin < SECONDS
    assert workers[0].poll() is not None


def test_heads_that_do_not_divide_are_said_before_anything_starts(checkpoints: Path) -> None:
    with (
        pytest.raises(ConfigError, match="num_attention_heads does not divide"),
        parallel_engine(checkpoints / "qwen3-tiny", EngineConfig(), 4),
    ):
        pass
