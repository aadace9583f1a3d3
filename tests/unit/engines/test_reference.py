"""The reference engine's adapter: ids, schedules, options and errors are translated and nothing is lost."""

import pytest

from harness.engines import Control, Timeline
from harness.engines.reference import open_engine
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec
from harness.formats.recording.manifest import RequestInfo
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome
from reference_engine import LLMEngine
from reference_engine.fast.fast_kernels import FastKernels

from .conftest import REQUESTS, computed


@pytest.fixture
def opened(checkpoints):
    def call(**options):
        return open_engine(checkpoints / "llama-tiny", dtype="float32", device="cpu", options=options)

    return call


@pytest.mark.parametrize("schedule", ["plain", "chunked:3", "batched", "mixed:3"])
def test_rows_carry_the_harnesss_own_request_ids(opened, record, schedule):
    with record(opened(), schedule) as recording:
        rows = [
            row
            for step in computed(recording)
            for row in zip(step.request.tolist(), step.position.tolist(), strict=True)
        ]
    assert sorted(rows) == sorted((request.id, at) for request in REQUESTS for at in range(len(request.token_ids)))


def test_block_tables_carry_them_too(opened, record):
    with record(opened(block_size="4"), "batched") as recording:
        tables = [set(step.block_tables or {}) for step in recording.steps]
    assert set().union(*tables) == {request.id for request in REQUESTS}


def test_plain_computes_one_request_at_a_time(opened, record):
    with record(opened(), "plain") as recording:
        assert all(len(set(step.request.tolist())) == 1 for step in computed(recording))


def test_batched_computes_them_together(opened, record):
    with record(opened(), "batched") as recording:
        assert max(len(set(step.request.tolist())) for step in computed(recording)) == 3


def test_chunks_are_as_long_as_the_schedule_says(opened, record):
    with record(opened(), "chunked:3", REQUESTS[:1]) as recording:
        assert [len(step.request) for step in computed(recording)] == [3, 3, 2, 1, 1]


def test_an_explicit_limit_outranks_the_schedule(opened, record):
    with record(opened(max_num_batched_tokens="2"), "chunked:3", REQUESTS[:1]) as recording:
        assert max(len(step.request) for step in computed(recording)) == 2


def test_a_run_starts_from_nothing(opened, record):
    engine = opened()
    with record(engine, "plain", REQUESTS[:1]) as recording:
        first = recording.steps[0].tap("lm_head").clone()
        folder = recording.path
    for file in folder.iterdir():
        file.unlink()
    with record(engine, "plain", REQUESTS[:1]) as recording:
        assert recording.steps[0].tap("lm_head").equal(first)


@pytest.mark.parametrize("schedule", ["plain", "batched", "forked"])
def test_a_run_gives_its_memory_back(opened, record, monkeypatch, schedule):
    closed, close = [], LLMEngine.close
    monkeypatch.setattr(LLMEngine, "close", lambda engine: closed.append(close(engine)))
    with record(opened(), schedule):
        assert len(closed) == 1


def test_what_keeps_no_cache_does_not_offer_one(opened):
    assert opened().capabilities.all_unsupported_taps() == ()
    assert opened(attention_backend="recompute").capabilities.all_unsupported_taps() == ("k_cache", "v_cache")


def test_options_have_the_types_of_their_fields(opened, record, monkeypatch):
    configs, make = [], LLMEngine.__init__

    def noting(engine, folder, config, **more):
        configs.append(config)
        make(engine, folder, config, **more)

    monkeypatch.setattr(LLMEngine, "__init__", noting)
    with record(opened(enable_prefix_caching="true", debug_checks="false", seed="7", num_blocks="64"), "plain"):
        (config,) = configs
    assert config.enable_prefix_caching is True
    assert config.debug_checks is False
    assert (config.seed, config.num_blocks) == (7, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocksize": "4"}, "no option 'blocksize'"),
        ({"dtype": "float16"}, "no option 'dtype'"),
        ({"block_size": "four"}, "block_size must be an integer"),
        ({"seed": "one"}, "seed must be an integer"),
        ({"debug_checks": "1"}, "debug_checks must be true or false"),
        ({"block_size": "0"}, "at least 1"),
        ({"attention_backend": "telepathy"}, "telepathy"),
    ],
)
def test_an_option_that_makes_no_sense(opened, record, options, words):
    with pytest.raises(HarnessError, match=words) as caught:
        record(opened(**options), "plain")
    assert caught.value.code is Code.BAD_OPTION


@pytest.mark.parametrize(
    ("options", "requests", "code"),
    [
        ({"num_blocks": "2", "block_size": "4"}, REQUESTS, Code.ENGINE_CANNOT_SERVE),
        ({"max_model_len": "8"}, REQUESTS, Code.ENGINE_CANNOT_SERVE),
        ({}, [RequestInfo(id=0, token_ids=[1, 999], prompt_length=2)], Code.ENGINE_CANNOT_SERVE),
    ],
)
def test_what_the_engine_cannot_serve(opened, record, options, requests, code, tmp_path):
    with pytest.raises(HarnessError) as caught:
        record(opened(**options), "plain", requests)
    assert caught.value.code is code
    assert not (tmp_path / "recording").exists()


def test_a_checkpoint_it_does_not_know(checkpoints, record, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    engine = open_engine(tmp_path, dtype="float32", device="cpu", options={})
    with pytest.raises(HarnessError, match="gpt2") as caught:
        record(engine, "plain")
    assert caught.value.code is Code.UNSUPPORTED_ARCHITECTURE


def by_step(recording):
    return [sorted(set(step.request.tolist())) for step in computed(recording)]


def test_a_timeline_says_when_requests_arrive(opened, record):
    with record(opened(), "plain", timeline=Timeline(arrivals={0: 1, 7: 2})) as recording:
        assert by_step(recording)[:4] == [[3], [0, 3], [0, 3, 7], [0]]


def test_an_idle_engine_is_given_the_next_request_at_once(opened, record):
    with record(opened(), "plain", timeline=Timeline(arrivals={0: 100, 7: 200})) as recording:
        assert by_step(recording) == [[3]] * 3 + [[0]] * 5 + [[7]]


def test_a_timeline_sets_limits_and_options_outrank_them(opened, record):
    timeline = Timeline(limits={"max_num_seqs": 1, "max_num_batched_tokens": 3})
    with record(opened(max_num_seqs="3"), "plain", timeline=timeline) as recording:
        assert max(map(len, by_step(recording))) == 3
        assert max(len(step.request) for step in computed(recording)) == 3


def test_an_aborted_request_is_not_finished(opened, record, monkeypatch):
    aborted, abort = [], LLMEngine.abort
    monkeypatch.setattr(LLMEngine, "abort", lambda engine, request: aborted.append(abort(engine, request)))
    with record(opened(), "plain", timeline=Timeline(aborted=frozenset({3, 7}))) as recording:
        rows = [row for step in computed(recording) for row in step.request.tolist()]
    assert len(aborted) == 2
    assert sorted(rows) == sorted(request.id for request in REQUESTS for _ in request.token_ids)


def test_a_fork_computes_what_follows_its_originals_prompt(opened, record):
    fork = RequestInfo(id=9, token_ids=[1, 4, 5, 6, 7, 8, 9, 10, 11, 50], prompt_length=9)
    with record(opened(), "plain", [*REQUESTS, fork], timeline=Timeline(forks={9: 3})) as recording:
        positions = [int(at) for step in computed(recording) for at in step.position[step.request == 9]]
    assert positions == [8, 9]


def test_a_request_is_forked_as_often_as_the_timeline_says(opened, record):
    forks = [RequestInfo(id=at, token_ids=[1, 4, 5, 6, 7, 8, 9, 10, 11, 50 + at], prompt_length=9) for at in (1, 2)]
    with record(opened(), "plain", [*REQUESTS, *forks], timeline=Timeline(forks={1: 3, 2: 3})) as recording:
        rows = [row for step in computed(recording) for row in step.request.tolist()]
    assert (rows.count(1), rows.count(2)) == (2, 2)


def test_what_an_option_has_decided_is_not_left_to_workloads(opened):
    assert opened(block_size="4", max_num_seqs="2").capabilities.control == Control(
        limits=("max_num_batched_tokens", "num_blocks", "enable_prefix_caching"), aborts=True, forks=True
    )
    assert opened(attention_backend="recompute").capabilities.control == Control(
        limits=("max_num_batched_tokens", "max_num_seqs"), aborts=True
    )


@pytest.mark.parametrize(("taps", "is_found"), [("all", False), ("logits", True), ("cache", True)])
def test_steps_that_run_otherwise_unobserved_are_judged_where_logits_are_asked_for(monkeypatch, taps, is_found):
    """As recorded steps do: what is wrong in a replay alone is not in the taps of a step that is watched."""
    run = FastKernels.run

    def replayed(self, forward, batch):
        logits = run(self, forward, batch)
        return logits if batch.observer is not None or logits is None else logits.roll(1, dims=-1)

    monkeypatch.setattr(FastKernels, "run", replayed)
    monkeypatch.setattr(FastKernels, "changes_when_observed", property(lambda self: True))
    requests = [RequestSpec(token_ids=REQUESTS[0].token_ids)]
    asked = {"model": "llama-tiny", "requests": requests, "max_new_tokens": 3, "schedules": ["plain"], "only": taps}
    report = run_check(plan_request(**asked))
    assert (report.outcome is Outcome.MISMATCH) == is_found
    assert {tap.name for tap in report.runs[0].taps if tap.judged_by != "none"} >= {"lm_head"}
