"""An engine as it is served: found where it computes something else than it was watched to, and else no alarm."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import AutoModelForCausalLM

import harness
from harness.engines.hf import open_engine
from harness.engines.record import RunDescription
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec
from harness.formats.recording import ModelInfo, RequestInfo
from harness.formats.schedule import Schedule
from harness.judge.jobs import served as subject
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.report.check.json import check_json
from harness.report.check.markdown import check_markdown
from harness.results.check import Outcome, ServedStatus
from reference_engine.model_runner import ModelRunner

from ...own_model import NAMES, OwnModel, load

PROMPTS = [[5, 9, 14, 3, 8, 21], [7, 8, 9, 10]]
REQUESTS = [RequestSpec(token_ids=ids) for ids in PROMPTS]
NUM_ROWS = 6


def check(engine, model, schedules=("plain",), prompts=PROMPTS, **options):
    return harness.check(engine, model=model, prompts=prompts, max_new_tokens=3, schedules=schedules, **options)


def is_watched(model):
    """Whether anything of torch's means to watch is in use."""
    hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    hooks += [hooks for item in model.modules() for hooks in (item._forward_hooks, item._forward_pre_hooks)]
    modes = _get_current_dispatch_mode(), *_get_current_function_mode_stack()
    return any(map(len, hooks)) or any(mode is not None for mode in modes)


def codes(result):
    return [finding.code for run in result.runs for finding in run.findings]


@pytest.fixture
def folder(checkpoints):
    return checkpoints / "qwen2-tiny"


@pytest.fixture
def step_engine(fused, folder):
    """Return an engine whose logits are changed where nothing is watched; it counts the rows of both kinds."""

    class StepEngine(fused.FusedEngine):
        def __init__(self, change):
            super().__init__(folder)
            self.change, self.num_rows = change, {True: 0, False: 0}
            self.free = [block * 37 % 256 for block in range(256)]
            for layer in self.model.layers:
                layer.attn.cache = torch.zeros(2, 256, *layer.attn.shape, fused.BLOCK)

        def reset(self):
            self.num_rows = {True: 0, False: 0}

        def step(self, work):
            logits, has_watcher = super().step(work), is_watched(self.model)
            self.num_rows[has_watcher] += len(logits)
            return logits if has_watcher else self.change(logits)

    return StepEngine


def test_a_step_engine_that_computes_something_else_unwatched(step_engine, folder):
    result = check(step_engine(lambda logits: logits.roll(1, -1)), folder)
    assert result.outcome is Outcome.MISMATCH
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    served = result.as_served
    assert (served.status, served.schedule, served.num_rows, served.num_different) == (
        ServedStatus.DIFFERS, "plain", NUM_ROWS, NUM_ROWS,
    )  # fmt: skip
    (finding,) = result.runs[0].findings
    assert (finding.tap, finding.request, finding.position) == ("lm_head", 0, 5)
    assert "6 of 6 rows of lm_head differ from the watched run" in finding.message
    assert "the largest logit is another in 6 rows" in finding.message
    line = "6 of 6 rows of logits under plain differ from the watched ones"
    assert f"  as served    {line}" in result.text()
    assert f"- as served: {line}" in check_markdown(result)
    assert line in result.html()
    document = check_json(result)
    assert document["as_served"] == document["runs"][0]["as_served"]
    assert document["as_served"]["status"] == "differs"
    assert (result.next_place.tap, result.next_place.cause) == ("lm_head", None)


def test_a_step_engine_that_rounds_otherwise_unwatched(step_engine, folder):
    engine = step_engine(lambda logits: logits.double().mul(1 + 1e-7).float())
    result = check(engine, folder, ["plain", "chunked:3"])
    result.assert_ok()
    plain, chunked = (run.as_served for run in result.runs)
    assert (chunked.status, chunked.num_rows, chunked.num_different, plain) == (
        ServedStatus.WITHIN_NOISE,
        NUM_ROWS,
        0,
        None,
    )
    assert 0 < chunked.ratio_max < chunked.allowed_ratio == 10
    text = " ".join(result.text().split())
    assert "as served 6 rows of logits under chunked:3 differ from the watched ones by up to" in text
    assert "times HF's own noise, 10.0 allowed" in text
    assert engine.num_rows == {True: 0, False: 8}, "the last run is the one as served"


def test_one_row_that_is_missing_in_noise_is_found(step_engine, folder):
    """A change of one row of six: the decode of a single position."""
    engine = step_engine(lambda logits: logits)
    engine.change = lambda logits: logits if engine.num_rows[False] != 2 else logits + 1e-3
    result = check(engine, folder)
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    assert (result.as_served.num_different, result.as_served.num_other_choices) == (1, 0)
    assert (result.runs[0].findings[0].request, result.runs[0].findings[0].position) == (0, 6)


def test_numbers_that_are_not_finite_differ(step_engine, folder):
    result = check(step_engine(lambda logits: logits * torch.nan), folder)
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    assert result.as_served.num_different == NUM_ROWS


def test_a_sound_engine_is_equal_and_run_once_more(step_engine, folder):
    engine = step_engine(lambda logits: logits)
    result = check(engine, folder, ["batched"])
    result.assert_ok()
    assert (result.as_served.status, result.as_served.schedule) == (ServedStatus.EQUAL, "batched")
    assert "  as served    6 rows of logits under batched equal the watched ones, bit for bit" in result.text()
    assert engine.num_rows == {True: 0, False: NUM_ROWS}


class Flickering:
    """HF's engine; what it computes is changed by the number of the run."""

    name = "flickering"

    def __init__(self, folder, changes):
        self.inner = open_engine(folder, dtype="float32", device="cpu", options={})
        self.changes, self.runs = changes, []

    @property
    def capabilities(self):
        return self.inner.capabilities

    def match_taps(self, graph):
        self.inner.match_taps(graph)

    def run(self, workload, writer):
        self.runs.append(workload.is_served)
        change = self.changes[len(self.runs) - 1]
        if isinstance(change, Exception):
            raise change
        head = self.inner._hf.model.lm_head
        head.weight.data *= 1 + change
        self.inner.run(workload, writer)
        head.weight.data /= 1 + change


def test_an_engine_that_is_not_deterministic_raises_no_alarm(folder, monkeypatch):
    """Its runs differ by less than the judge of operations sees; the bound is made smaller, to see it here."""
    monkeypatch.setattr(subject, "RATIO_BOUND", 1e-3)
    monkeypatch.setattr(subject, "_allowed_ratio", lambda _ratios: 1e-3)
    engine = Flickering(folder, [0, 1e-6, 2e-6])
    result = check(engine, folder)
    result.assert_ok()
    assert engine.runs == [False, True, False]
    assert result.as_served.status is ServedStatus.NOT_DETERMINISTIC
    _headline, first, *_rest = result.text().split("\n\n")
    assert first.startswith("  seen         H241: not deterministic: two watched runs under plain differ by up to")


def test_an_engine_whose_watched_runs_agree_is_not_called_random(folder):
    engine = Flickering(folder, [0, 1e-2, 0])
    result = check(engine, folder)
    assert engine.runs == [False, True, False]
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    assert result.as_served.num_other_choices == 0


def test_an_engine_that_raises_when_it_is_not_watched(folder):
    with pytest.raises(HarnessError, match="RuntimeError: no graph was recorded") as caught:
        check(Flickering(folder, [0, RuntimeError("no graph was recorded"), 0]), folder)
    assert (caught.value.code, caught.value.where) == (Code.ENGINE_FAILED, "flickering, schedule plain, as served")


def test_what_the_watched_run_has_shown_stays_where_the_engine_then_raises(folder):
    result = check(Flickering(folder, [1e-2, RuntimeError("no graph was recorded")]), folder)
    assert codes(result) == [Code.LOCAL_ERROR]
    assert result.as_served.status is ServedStatus.NOT_RUN
    assert "RuntimeError: no graph was recorded" in result.as_served.reason


def test_an_engine_that_frees_too_little_for_another_run_raises_no_alarm(folder):
    full = RuntimeError("no free block")
    result = check(Flickering(folder, [0, full, full]), folder)
    result.assert_ok()
    assert result.as_served.status is ServedStatus.NOT_RUN
    assert "no free block" in result.as_served.reason


def test_a_check_that_ends_early_says_that_nothing_was_served(folder):
    plan = plan_request(
        model=str(folder), engine="hf", schedules=["plain", "batched"], requests=REQUESTS, budget_s=1e-9
    )
    result = run_check(plan)
    assert result.schedules_not_run == ("batched",)
    assert result.as_served.reason == "the check ended before its last schedule"


class Partial(Flickering):
    """Its first request alone is computed as served."""

    def run(self, workload, writer):
        some = replace(workload, requests=workload.requests[:1]) if workload.is_served else workload
        super().run(some, writer)


def test_rows_that_are_missing_as_served(folder):
    result = check(Partial(folder, [0, 0, 0]), folder)
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    assert (result.as_served.num_rows, result.as_served.num_different) == (NUM_ROWS, 3)
    assert (result.runs[0].findings[0].request, result.as_served.ratio_max) == (1, float("inf"))
    assert check_json(result)["as_served"]["ratio_max"] == "inf"


class Declared(Flickering):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, not_served="its kernels have no logits")


def test_an_engine_that_cannot_run_unwatched_says_why(folder):
    engine = Declared(folder, [0])
    result = check(engine, folder)
    result.assert_ok()
    assert engine.runs == [False]
    assert result.as_served.status is ServedStatus.NOT_RUN
    assert "  as served    not run, because its kernels have no logits: what was recorded" in result.text()


def test_an_adapter_is_not_believed_to_run_unwatched():
    assert harness.engines.Capabilities(schedules=("plain",)).not_served.startswith("its adapter does not declare")


@pytest.mark.parametrize("names", [NAMES, {}])
def test_a_module_that_computes_something_else_unwatched(checkpoints, names):
    class Fast(OwnModel):
        fast = False

        def forward(self, *args, **kwargs):
            logits = super().forward(*args, **kwargs)
            return logits.roll(1, -1) if self.fast and not is_watched(self) else logits

    module, model = load(checkpoints / "qwen3-tiny", Fast), checkpoints / "qwen3-tiny"
    module.fast = bool(names)  # without names nothing of it is watched
    result = check(module, model, names=names)
    assert codes(result) == ([Code.OBSERVED_NOT_SERVED] if names else [])
    assert result.as_served.status is (ServedStatus.DIFFERS if names else ServedStatus.EQUAL)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_of_hf_that_computes_something_else_unwatched(folder, monkeypatch, attention):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    sound = check(model, folder)
    assert (sound.outcome, sound.as_served.status) == (Outcome.PASS, ServedStatus.EQUAL)
    forward = type(model.lm_head).forward
    monkeypatch.setattr(
        model.lm_head, "forward", lambda x: forward(model.lm_head, x) * (1 if is_watched(model) else 0.5)
    )
    result = check(model, folder)
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]
    assert result.as_served.num_other_choices == 0
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(("isolate", "attention"), [(False, "eager"), (True, "sdpa")])
def test_hf_is_equal_in_either_process(folder, isolate, attention):
    limit = {"engine_timeout_s": 300.0} if isolate else {}
    plan = plan_request(
        model=str(folder),
        engine="hf",
        engine_options={"attention": attention},
        schedules=["batched"],
        requests=REQUESTS,
        max_new_tokens=3,
        **limit,
    )
    assert plan.isolates_engine == isolate
    result = run_check(plan)
    assert (result.outcome, result.as_served.status) == (Outcome.PASS, ServedStatus.EQUAL)


def test_the_reference_engine_that_computes_something_else_unwatched(folder, monkeypatch):
    forward = ModelRunner.forward

    def changed(self, batch):
        logits = forward(self, batch)
        return logits if logits is None or batch.observer is not None else logits.roll(1, -1)

    monkeypatch.setattr(ModelRunner, "forward", changed)
    result = check("reference", folder)
    assert codes(result) == [Code.OBSERVED_NOT_SERVED]


def test_another_process_is_told_to_run_as_served(tmp_path):
    run = RunDescription(
        engine="mine",
        folder=tmp_path,
        model=ModelInfo(id="m", revision=None, config_hash=None, weights_hash=None),
        dtype="float32",
        device="cpu",
        schedule=Schedule.of("plain"),
        requests=[RequestInfo(id=0, token_ids=[1, 2], prompt_length=1)],
        is_served=True,
    )
    assert RunDescription.from_json(json.loads(json.dumps(run.to_json()))).workload.is_served
    assert not RunDescription.from_json(replace(run, is_served=False).to_json()).workload.is_served
    assert asdict(harness.engines.Capabilities(schedules=(), not_served=None))["not_served"] is None
