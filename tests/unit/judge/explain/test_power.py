"""The power of a pass: a mistake that sound rows say would be seen is seen when it is planted, and no other is."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import harness
from harness.formats.taps import Kind
from harness.judge.compare import local
from harness.judge.compare.batch import PaddedBatch, RecordedRows
from harness.judge.explain import power
from harness.judge.explain.core.wrong_operation import Hypothesis
from harness.judge.explain.run import Explainer
from harness.judge.jobs import check
from harness.report.check.sentences import power_sentence
from harness.results.check import Outcome

PROMPTS = [[5, 17, 99, 23, 64, 8, 41], [30, 31, 90, 12, 7, 55, 81, 120, 3, 77, 45, 9, 66]]
ELSEWHERE = "other prompts, weights or schedules"
LONG = 3_000_000
"""Functions of torch that take many times the time of a search."""
BESIDE = 0.7, 1.4
"""Shares of the bound between which rounding decides whether a mistake is seen."""


def model_of(dtype, *, weights):
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += weights * torch.randn(parameter.shape)
        else:
            parameter.data *= 3
    return model


@pytest.fixture
def sound(tmp_path, monkeypatch):
    """Check a sound module, and return its report with what the power is computed from."""

    def run(dtype=torch.float32, weights=0.2, prompts=PROMPTS):
        kept = []

        def keep(*args, **options):
            kept.append(args)
            return power.power_of(*args)

        monkeypatch.setattr(check, "power_of", keep)
        model = model_of(dtype, weights=weights)
        model.save_pretrained(tmp_path)
        report = harness.check(model, model=tmp_path, prompts=prompts, max_new_tokens=2, schedules=["plain"])
        return report, kept[0]

    return run


@pytest.fixture
def judged_with(monkeypatch):
    """Judge a sound recording again with one operation's rows replaced."""
    original = PaddedBatch.recorded

    def judge(recording, hf, tap, values):
        def planted(batch, name):
            recorded = original(batch, name)
            if name != tap or recorded is None:
                return recorded
            rows = recorded.rows.clone()
            for at, row in enumerate(batch.rows(recorded.places).identities()):
                if row in values:
                    rows[at] = values[row].to(rows.dtype).view_as(rows[at])
            return RecordedRows(places=recorded.places, rows=rows)

        monkeypatch.setattr(PaddedBatch, "recorded", planted)
        errors = local.local_errors(recording, hf, {op.tap for op in hf.graph}).errors[tap]
        monkeypatch.setattr(PaddedBatch, "recorded", original)
        return errors

    return judge


def outputs(comparison, recording, golden, hf, tap):
    """Return what each known mistake makes of the sampled rows, by its name, and by that with its way.

    A name alone stands for its last way.
    """
    with torch.no_grad(), ExitStack() as stack:
        explainer = Explainer(comparison, recording, golden, hf, stack)
        explainer.hold(hf.graph[tap], stack)
        rows = explainer.wrong_operation(comparison.sound[tap], stack)
        made = [mistake for known in (None, 0, power._ENOUGH) for mistake in power.mistakes_in(rows, known, [])]
        by_way = {f"{mistake.cause} ({mistake.detail})": mistake.output for mistake in made}
        return rows, {mistake.cause: mistake.output for mistake in made} | by_way


def test_a_weight_of_ones_hides_what_is_done_with_it(sound):
    hidden = "is all one: not applied", "is squared: applied twice"
    for weights, is_seen in ((0.0, False), (0.2, True)):
        report, _ = sound(weights=weights)
        mistakes = [item for item in report.power.mistakes if item.mistake.endswith(hidden)]
        mistakes = [item for item in mistakes if "norm" in item.tap]
        assert len(mistakes) == 2 * sum("norm" in tap for tap in report.power.tried) >= 10
        assert {item.is_seen for item in mistakes} == {is_seen}
        assert {item.needs for item in mistakes} == ({None} if is_seen else {ELSEWHERE})


def test_bfloat16_hides_what_float32_shows(sound):
    name = "model.layers.0.post_attention_layernorm", "wrong eps: 1e-07 instead of 1e-06"
    shares = {}
    for dtype in (torch.bfloat16, torch.float32):
        report, _ = sound(dtype)
        shares[dtype] = next(item for item in report.power.mistakes if (item.tap, item.mistake) == name)
    assert not shares[torch.bfloat16].is_seen
    assert shares[torch.bfloat16].needs == "float32"
    assert shares[torch.float32].is_seen
    assert shares[torch.float32].bound_share > 1000 * shares[torch.bfloat16].bound_share


def test_changes_of_hf_code_stand_for_mistakes_that_nobody_wrote_down(sound):
    report, _ = sound()
    mistakes = {item.mistake.split(":")[0]: item for item in report.power.mistakes if item.tap.endswith("mlp.act")}
    assert {"the activation is GELU", "no activation is applied", "the gate is missing"} <= mistakes.keys()
    assert all(item.is_seen for item in mistakes.values())


def test_pieces_longer_than_every_request_are_mistakes_that_the_run_does_not_show(sound):
    report, _ = sound()
    longest = max(map(len, PROMPTS)) + 1
    shown = {item.mistake: item for item in report.power.mistakes if item.mistake.startswith("split KV")}
    for cause in ("split KV: the pieces are averaged", "split KV: natural log-sum-exp is merged in base 2"):
        assert shown[cause].is_seen
        assert shown[f"{cause} (pieces of {longest} tokens)"].needs == ELSEWHERE


def test_slots_of_other_positions_and_requests_are_tried(sound):
    block, foreign = (
        "reads one block of its history from a wrong place",
        "reads its history from slots that another request",
    )
    newest = "reads the newest token as zeros: not written, or from a slot nobody wrote"
    for prompts, is_seen in ((PROMPTS, {newest, block, f"{foreign} wrote"}), (PROMPTS[:1], {newest})):
        report, _ = sound(prompts=prompts)
        tried = {item.mistake: item for item in report.power.mistakes if item.tap.endswith("attention")}
        assert is_seen == {
            name for name in (newest, block, f"{foreign} wrote") if name in tried and tried[name].is_seen
        }
    assert tried[block].needs == ELSEWHERE  # a request of one block


def test_positions_that_the_schedule_hides_are_said(sound):
    report, _ = sound()
    shown = {item.mistake: item for item in report.power.mistakes if item.tap == "model.layers.0.q_rope"}
    assert shown["rotary at a position off by one (+1)"].is_seen
    assert shown["the rows of other requests before it in the step are added to the position"].needs == ELSEWHERE


def test_caches_are_compared_bit_for_bit_and_the_smallest_change_is_said(sound):
    for dtype, least, most in ((torch.float32, 1e-7, 1e-4), (torch.bfloat16, 1e-3, 0.1)):
        report, _ = sound(dtype)
        assert report.power.bit_for_bit == ("k_cache", "v_cache")
        assert not report.power.not_covered
        assert least < report.power.smallest_change < most
        assert "; k_cache, v_cache would have shown any other bit" in power_sentence(report.power)


def test_where_no_mistake_is_tried_is_said(sound):
    _, (comparison, *rest) = sound()
    without = {tap: rows for tap, rows in comparison.sound.items() if "mlp" not in tap}
    result = power.power_of(replace(comparison, sound=without), *rest)
    assert result.not_covered == ("mlp.gate_proj", "mlp.up_proj", "mlp.act", "mlp.down_proj")
    assert "; none tried in mlp.gate_proj" in power_sentence(result)


def test_no_time_leaves_operations_out_and_says_so(sound):
    _, inputs = sound()
    result = power.power_of(*inputs, budget_s=-1)
    assert result.mistakes == result.tried == ()
    assert len(result.not_tried) == len(inputs[0].sound) > 15
    assert power_sentence(result).startswith("no known mistake was tried; there was no time for ")


def test_what_there_was_no_time_for_is_said_behind_the_count(sound, monkeypatch):
    _, inputs = sound()
    seconds = count()
    monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    result = power.power_of(*inputs, budget_s=9)
    assert 0 < len(result.mistakes) < 9
    assert len(result.tried) > 1
    assert result.in_part == result.tried, "no code was changed"
    counted, rest, in_part, *_ = power_sentence(result).split("; ")
    assert counted.endswith(f"known mistakes in {len(result.tried)} operations would have been seen")
    assert rest.startswith(f"there was no time for {len(result.not_tried)} operations (model.")
    assert in_part == f"not all mistakes tried in {len(result.tried)} of the {len(result.tried)}, for want of time"
    assert power.power_of(*inputs, budget_s=1e9).in_part == ()


def test_one_mistake_takes_no_more_than_the_time_of_its_operation(sound, monkeypatch):
    """What is computed of a wide product may take longer than all that there is time for."""
    _, inputs = sound()
    ended = []

    def wide(wrong):
        yield Hypothesis(cause="all are zero", output=torch.zeros_like(wrong.expected))
        weight = torch.zeros(8)
        try:
            for _ in range(LONG):
                weight = weight + 1
        finally:
            ended.append(float(weight.sum()))

    monkeypatch.setattr(power, "known_mistakes", lambda kind: (wide,))
    monkeypatch.setattr(power, "_WIDE", 1)
    result = power.power_of(*inputs, budget_s=3)
    assert result.in_part == result.tried
    assert len(ended) >= len(result.tried) > 15
    assert {mistake.mistake for mistake in result.mistakes} == {"all are zero"}


def test_products_that_are_too_wide_for_the_time_leave_it_to_the_others(sound, monkeypatch):
    """One of them shows that no mistake of a product can be tried in its share; then the others come last."""
    _, inputs = sound()
    entered = []

    def slow(wrong):
        entered.append(wrong.operation.tap)
        for _ in range(LONG if wrong.operation.kind is Kind.LINEAR else 0):
            torch.zeros(8) + 1
        yield Hypothesis(cause="all are zero", output=torch.zeros_like(wrong.expected))

    monkeypatch.setattr(power, "known_mistakes", lambda kind: (slow,))
    monkeypatch.setattr(power, "_WIDE", 1)
    monkeypatch.setattr(power, "likely_mistakes", lambda wrong, of_code: ())
    result = power.power_of(*inputs, budget_s=3)
    products = {op.tap for op in inputs[3].graph if op.kind is Kind.LINEAR and op.tap in inputs[0].sound}
    assert set(result.not_tried) == products
    assert len(products) > 6
    assert len(products.intersection(entered)) <= 2


def test_a_mismatch_has_no_power(sound, tmp_path):
    report, _ = sound()
    wrong = model_of(torch.float32, weights=0.2)
    wrong.model.norm.variance_epsilon = 1.0
    report = harness.check(wrong, model=tmp_path, prompts=PROMPTS, max_new_tokens=2, schedules=["plain"])
    assert report.outcome is Outcome.MISMATCH
    assert report.power is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_foretold_is_what_the_judge_says(sound, judged_with, dtype, monkeypatch):
    monkeypatch.setattr(local, "_SOUND_ROWS", 1000)
    monkeypatch.setattr(local, "_SOUND_QUERIES", 1000)
    report, (comparison, recording, golden, hf) = sound(dtype)
    by_tap = {}
    for item in report.power.mistakes:
        if not BESIDE[0] < item.bound_share < BESIDE[1]:
            by_tap.setdefault(item.tap, []).append(item)
    right = wrong = 0
    for tap, mistakes in by_tap.items():
        rows, planted = outputs(comparison, recording, golden, hf, tap)
        unseen, seen = ([item for item in mistakes if item.is_seen is is_seen] for is_seen in (False, True))
        for item in (*unseen[:4], *seen[:: max(1, len(seen) // 4)]):
            if item.mistake not in planted:  # a trial may be ended for its time
                continue
            change = planted[item.mistake] - rows.expected
            values = dict(zip(rows.rows.identities(), rows.actual + change, strict=True))
            errors = judged_with(recording, hf, tap, values)
            is_right = bool(errors.bad.any()) is item.is_seen
            right, wrong = right + is_right, wrong + (not is_right)
    assert right + wrong > 80
    assert right >= 0.97 * (right + wrong)
