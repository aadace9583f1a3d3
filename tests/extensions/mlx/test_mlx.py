"""mlx-lm under test, where it is installed."""

import re

import pytest
import torch

import harness
from harness.engines import open_engine
from harness.extensions.fuzz.poison import Poisoner
from harness.formats.recording import RequestInfo
from harness.formats.schedule import parse_schedule
from harness.oracle.model import load_model
from harness.plan import plan_engine
from harness.results.check import Memory

mlx_cache = pytest.importorskip("mlx_lm.models.cache", exc_type=ImportError)

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]


def check(checkpoints, name, **options):
    return harness.check("mlx", model=checkpoints / name, prompts=PROMPTS, max_new_tokens=4, **options)


@pytest.mark.parametrize(("name", "num_taps"), [("qwen3-tiny", 54), ("gemma3-tiny", 117)])
def test_every_operation_passes(checkpoints, name, num_taps):
    report = check(checkpoints, name, schedules=["plain", "chunked:3"])
    assert report, report.text()
    assert sum(report.seen.num_taps.values()) == num_taps
    assert all(run.coverage.not_offered == () for run in report.runs)


@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma3-tiny"])
def test_a_batch_passes(checkpoints, name):
    """Prompts of unequal length, one longer than the window: padded on the right, then shifted."""
    prompts = [*PROMPTS, [*range(20, 56)]]
    (run,) = harness.check(
        "mlx", model=checkpoints / name, prompts=prompts, max_new_tokens=4, schedules=["batched"]
    ).runs
    assert run.findings == ()
    assert run.coverage.missing == 0


@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma3-tiny"])
def test_a_prompt_cache_passes(checkpoints, name):
    (run,) = check(checkpoints, name, schedules=["prefix-hit"]).runs
    assert run.findings == ()
    assert run.coverage.missing == 0


def test_a_prompt_cache_with_a_token_too_many_is_named(checkpoints, monkeypatch):
    """The copy of a cache is trimmed by one token less than it should be."""
    trim = mlx_cache.trim_prompt_cache
    monkeypatch.setattr(mlx_cache, "trim_prompt_cache", lambda cache, num: trim(cache, max(0, num - 1)))
    engine = open_engine("mlx", checkpoints / "qwen3-tiny", dtype="float32", device="cpu", options={})
    options = {"prompts": PROMPTS, "max_new_tokens": 4, "dtype": "float32", "schedules": ["prefix-hit"]}
    (run,) = harness.check(engine, model=checkpoints / "qwen3-tiny", **options).runs
    assert run.first_divergence.tap == "model.layers.0.q_rope"
    assert run.first_divergence.request >= len(PROMPTS)


def test_padding_in_the_states_of_a_batch_is_named(tiny_folder):
    """mlx-lm's Mamba does not look at the lengths that its cache is told: reports/cpu/mlx_ragged_states.py."""
    (run,) = mamba(tiny_folder, dtype="float32", schedules=["batched"]).runs
    causes = {finding.tap: finding.explanation.cause for finding in run.findings if finding.explanation}
    assert causes["backbone.layers.0.conv_state"] == "padding is in it: rows of token 0 after the prompt"


def test_what_its_config_does_not_read_is_named(checkpoints):
    (run,) = check(checkpoints, "llama-tiny", schedules=["plain"]).runs
    assert run.first_divergence.tap == "model.layers.0.q_rope"
    assert "rope scaling (llama3) is ignored" in run.first_divergence.explanation.cause


def test_a_window_that_does_not_rewind_is_named(checkpoints):
    """The second prompt is longer than the window: trimming its cache does nothing."""
    assert check(checkpoints, "qwen3-tiny", schedules=["rewound"])
    options = {"model": checkpoints / "gemma3-tiny", "prompts": [[*range(5, 41)]], "max_new_tokens": 8}
    for schedule, what in (("rewound", "a token that was taken back"), ("speculative", "a rejected draft")):
        (run,) = harness.check("mlx", schedules=[schedule], **options).runs
        causes = {finding.tap: finding.explanation.cause for finding in run.findings if finding.explanation}
        assert re.fullmatch(
            f"positions go on behind {what}, position .*: the request never went back", causes["model.layers.0.q_rope"]
        )
        assert causes["model.layers.0.attention"].startswith(f"attends to {what}, position ")


def test_a_model_that_it_does_not_know_is_refused_in_its_words(checkpoints):
    with pytest.raises(harness.HarnessError, match=r"(?s)H015.*rope_theta"):
        check(checkpoints, "qwen3-moe-tiny")


def mamba(tiny_folder, **options):
    return harness.check("mlx", model=tiny_folder("mamba"), prompts=PROMPTS, max_new_tokens=4, **options)


def test_states_are_found_and_pass(tiny_folder):
    """A convolution's has one column less than HF's, and the other way around; HF itself cannot do chunks of Mamba."""
    report = mamba(tiny_folder, dtype="float32", schedules=["plain", "chunked:3"])
    assert report, report.text()
    for run in report.runs:
        assert sum(tap.num_rows for tap in run.taps if "_state" in tap.name) >= 4 * 2 * 4
        assert not [site for site in run.coverage.not_offered if "_state" in site]


@pytest.mark.parametrize(("kept", "cause"), [(0, "conv"), (1, "recurrent")])
def test_a_state_that_is_lost_is_named(tiny_folder, monkeypatch, kept, cause):
    from harness.extensions import mlx

    class Losing(mlx.MLXStepper):
        def step(self, work):
            logits = super().step(work)
            ((request, _tokens, first),) = work
            if first >= len(PROMPTS[0]):
                for cache in self._caches[request]:
                    cache.cache[kept] = 0 * cache.cache[kept]
            return logits

    monkeypatch.setattr(mlx, "MLXStepper", Losing)
    engine = open_engine("mlx", tiny_folder("mamba"), dtype="float32", device="cpu", options={})
    options = {"prompts": PROMPTS, "max_new_tokens": 4, "dtype": "float32", "schedules": ["plain"]}
    (run,) = harness.check(engine, model=tiny_folder("mamba"), **options).runs
    assert f"{cause}_state" in run.first_divergence.tap
    assert run.first_divergence.position == len(PROMPTS[0])
    assert run.first_divergence.explanation.cause == "is zero: it was never written, or it was cleared"


def test_states_do_not_go_back(tiny_folder):
    with pytest.raises(harness.HarnessError, match=r"(?s)H015.*ArraysCache cannot be trimmed"):
        mamba(tiny_folder, dtype="float32", schedules=["rewound"])


def test_what_it_cannot_do_is_refused(checkpoints):
    from harness.extensions.mlx import open_engine

    for arguments, words in (({"device": "cuda"}, "on the CPU here"), ({"options": {"a": "1"}}, "no option 'a'")):
        with pytest.raises(harness.HarnessError, match=words):
            open_engine(checkpoints / "qwen3-tiny", **{"dtype": "float32", "device": "cpu", "options": {}, **arguments})


@pytest.fixture
def poisoned(checkpoints):
    """Return what poisons its cache under a schedule, and returns the poisoner."""
    folder = checkpoints / "qwen3-tiny"
    graph = load_model(folder, dtype=torch.float32).graph
    engine = open_engine("mlx", folder, dtype="float32", device="cpu", options={})
    engine.match_taps(graph)
    requests = [RequestInfo(id=at, token_ids=prompt, prompt_length=6) for at, prompt in enumerate(PROMPTS)]

    def run(schedule):
        poisoner = Poisoner(
            plan=plan_engine(model=str(folder), engine="mlx", dtype="float32"), engine=engine, graph=graph, pool=None,
            progress=None, limit_s=60.0,
        )  # fmt: skip
        poisoner.poison(parse_schedule(schedule), requests, victim=0)
        return poisoner

    return run


@pytest.mark.slow
def test_what_stands_behind_its_tokens_is_not_read(poisoned, monkeypatch):
    leaks = poisoned("rewound")
    assert (leaks.leaks, leaks.failures) == ((), [])
    assert {memory.memory for memory in leaks.memories() if memory.num_filled} >= {Memory.UNUSED}


@pytest.mark.slow
def test_what_adds_a_place_behind_its_tokens_is_named(poisoned, monkeypatch):
    cache = pytest.importorskip("mlx_lm.models.cache").KVCache
    kept = cache.keys_and_values

    def with_the_next(original):
        keys, values = kept(original)
        return keys, values + 0 * original.values[..., original.offset : original.offset + 1, :]

    monkeypatch.setattr(cache, "keys_and_values", with_the_next)
    (leak,) = poisoned("plain").leaks
    assert (leak.memory, leak.tap, leak.request, leak.position) == (Memory.UNUSED, "model.layers.0.attention", 0, 6)
    assert leak.values == ("nan", "inf")
