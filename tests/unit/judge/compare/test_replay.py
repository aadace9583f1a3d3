"""Forced replay: HF goes on with each recorded row, and rows are judged where what they were computed from is known."""

from fnmatch import fnmatchcase

import pytest
import torch

from harness.base.threads import one_thread
from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare.batch import RowSample, make_batches
from harness.judge.compare.local import LocalJudge
from harness.judge.compare.replay import Replay, put_back, unrecorded_before
from harness.judge.compare.sequences import sequences
from harness.oracle.paired import run_pair
from harness.results.check import Outcome, Verdict

from ....closeness import near, near_roundings
from .conftest import LENGTHS, NUM_NEW
from .judgements import tap

PREFIX = "model.layers.1."
HEAD = "lm_head"


def everywhere():
    return sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)


def without(actual, name, *rows):
    """Leave some rows of a tap out, as an engine does that computes a tap for some of its rows."""
    for step in actual.computing():
        covered = step.rows_of.get(name, list(range(len(step.request))))
        kept = [row for row in covered if (step.request[row], step.position[row]) not in rows]
        if name in step.taps and len(kept) < len(covered):
            step.taps[name] = step.taps[name][[covered.index(row) for row in kept]]
            step.rows_of[name] = kept
        if name in step.taps and not kept:
            del step.taps[name], step.rows_of[name]


def test_rows_are_put_back_where_they_stand():
    rows = torch.arange(12.0).view(4, 3)
    recorded = torch.tensor([[9, 9, 9], [7, 7, 7]], dtype=torch.bfloat16)
    changed = put_back(rows, torch.tensor([3, 1]), recorded)
    assert changed.tolist() == [[0, 1, 2], [7, 7, 7], [6, 7, 8], [9, 9, 9]]
    assert rows.tolist() == torch.arange(12.0).view(4, 3).tolist(), "in a copy"
    assert changed.dtype == torch.float32
    whole = put_back(rows.view(4, 1, 3), torch.arange(4), torch.ones(4, 3))
    assert whole.shape == (4, 1, 3), "in the shape that HF has"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operation_is_judged_on_what_the_engine_gave_it(bench, tmp_path, dtype):
    """Every tap is noise of its own; the same wrong rows downstream would be bugs if nothing were put back."""
    one = bench("qwen3-tiny", dtype)
    actual, name = one.recorded(), f"{PREFIX}attn_residual"
    generator = torch.Generator().manual_seed(1)
    for step in actual.computing():
        x = step.taps[name].float()
        step.taps[name] = (x + torch.randn(x.shape, generator=generator)).to(dtype)
        normed = one.hf.module(f"{PREFIX}post_attention_layernorm")(step.taps[name])
        step.taps[f"{PREFIX}post_attention_layernorm"] = normed
    run = one.compare(actual.write(tmp_path / "r"))
    assert tap(run, name).num_bad_rows == everywhere()
    assert tap(run, f"{PREFIX}post_attention_layernorm").verdict in (Verdict.NOISE, Verdict.EXACT)
    readers = {op.tap for op in one.hf.graph if {name, f"{PREFIX}post_attention_layernorm"} & set(op.inputs)}
    assert {item.name for item in run.taps if item.num_bad_rows} <= {name, *readers}


def test_rows_whose_input_is_unknown_are_not_judged(one, tmp_path):
    actual, row = one.recorded(), (2, 3)
    without(actual, f"{PREFIX}mlp.act", row)
    actual.at(f"{PREFIX}mlp.down_proj", *row).mul_(2)
    run = one.compare(actual.write(tmp_path / "r"), wanted=[])
    assert tap(run, f"{PREFIX}mlp.down_proj").num_rows == everywhere() - 1
    assert tap(run, f"{PREFIX}mlp.down_proj").num_bad_rows == 0
    actual.at(f"{PREFIX}mlp.down_proj", 2, 4).mul_(2)
    assert tap(one.compare(actual.write(tmp_path / "s"), wanted=[]), f"{PREFIX}mlp.down_proj").num_bad_rows == 1


@pytest.mark.parametrize("part", ["k_rope", "self_attn.v_proj"])
def test_a_history_with_a_hole_is_not_judged_behind_it(one, actual, tmp_path, part):
    without(actual, f"{PREFIX}{part}", (0, 5))
    for at in (4, 5, 9):
        actual.at(f"{PREFIX}attention", 0, at).mul_(2)
    result = tap(one.compare(actual.write(tmp_path / "r"), wanted=[]), f"{PREFIX}attention")
    length = LENGTHS[0] + NUM_NEW - 1
    assert result.num_rows == everywhere() - (length - 5)
    assert result.num_bad_rows == 1
    assert (result.first_bad.request, result.first_bad.position) == (0, 4)


def test_a_query_that_is_unknown_is_one_row(one, actual, tmp_path):
    without(actual, f"{PREFIX}q_rope", (0, 5))
    result = tap(one.compare(actual.write(tmp_path / "r"), wanted=[]), f"{PREFIX}attention")
    assert result.num_rows == everywhere() - 1


def test_attention_that_reads_another_history_is_found_at_the_attention(one, tmp_path):
    """A decode step that reads the keys of another request."""
    actual, row = one.recorded(), (1, LENGTHS[1] + 1)
    actual.at(f"{PREFIX}attention", *row).copy_(actual.at(f"{PREFIX}attention", 0, row[1]))
    run = one.compare(actual.write(tmp_path / "r"))
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == (f"{PREFIX}attention", *row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["plain", "chunked:3", "mixed:5", "batched"])
def test_local_errors_do_not_depend_on_the_schedule(one, tmp_path, schedule):
    """Rows are judged in whole sequences, whatever the pieces in which they were computed."""
    actual = one.recorded(schedule, engine="reference")
    actual.at(f"{PREFIX}mlp.up_proj", 2, 8).mul_(1.01)
    run = one.compare(actual.write(tmp_path / "r"))
    assert {item.name for item in run.taps if item.num_bad_rows} <= {f"{PREFIX}mlp.up_proj", f"{PREFIX}mlp.act"}
    assert tap(run, f"{PREFIX}mlp.up_proj").local_roundings_max > 1000
    for item in run.taps:
        assert item.num_rows == (len(LENGTHS) * NUM_NEW if item.name == HEAD else everywhere())


def test_several_batches_are_one_judgement(one, actual, tmp_path, monkeypatch):
    actual.at(f"{PREFIX}mlp.up_proj", 2, 8).mul_(1.01)
    recording = actual.write(tmp_path / "r")
    together = one.comparison(recording)
    monkeypatch.setattr("harness.judge.compare.local.batch_tokens", lambda _hf: 1)
    apart = one.comparison(recording)
    for name, errors in together.errors.items():
        errors_apart = apart.errors[name]
        assert sorted(errors.rows.request.tolist()) == sorted(errors_apart.rows.request.tolist())
        assert int(errors.bad.sum()) == int(errors_apart.bad.sum())
        roundings = errors.roundings.sort().values.tolist()
        expected = near(roundings, absolute=4.0) if "rope" in name else near_roundings(roundings, torch.float32)
        assert errors_apart.roundings.sort().values.tolist() == expected, (
            name
        )  # HF's cosines are float32, by any kernel
    assert apart.result.first_divergence == near_roundings(together.result.first_divergence, torch.float32)
    assert apart.evidence.keys() == together.evidence.keys()


@one_thread()  # of torch: workers have one each, and another number may sum in another order
def test_several_threads_come_to_the_same_judgement(one, actual, tmp_path, monkeypatch):
    actual.at(f"{PREFIX}mlp.up_proj", 2, 8).mul_(1.01)
    recording = actual.write(tmp_path / "r")
    alone = one.comparison(recording)
    monkeypatch.setattr("harness.judge.compare.local.num_spare_threads", lambda _device: 3)
    beside = one.comparison(recording)
    assert beside.result.findings == alone.result.findings
    assert list(beside.errors) == list(alone.errors)
    for name, errors in alone.errors.items():
        expected = beside.errors[name]
        for column in ("roundings", "bound", "bad", "control"):
            left, right = getattr(errors, column), getattr(expected, column)
            assert (left is None and right is None) or torch.equal(left, right), (name, column)
        assert expected.effect == errors.effect
    assert {tap: item.roundings.tolist() for tap, item in beside.evidence.items()} == {
        tap: item.roundings.tolist() for tap, item in alone.evidence.items()
    }


def test_values_are_kept_until_their_last_reader_has_been_judged(one, tmp_path):
    recording = one.recorded().write(tmp_path / "r").with_names(one.hf.graph.aliases)
    usable = {entry.name for entry in recording.taps}
    judge = LocalJudge(one.hf, torch.float32, usable, is_alone=True)
    (batch,) = make_batches(recording, sequences(recording), 10_000)
    most = []

    class Counting(Replay):
        def truth(self, value):
            result = super().truth(value)
            most.append(len(self._values))
            return result

    replay = Counting(judge, batch)
    run_pair(one.hf, batch.token_ids, replay, truth_dtype=torch.float64, logit_positions=replay.logit_positions)
    assert max(most) <= 6, "a layer's residual and what lies between it and the next"
    assert replay._values == {}
    assert replay._control == {}
    assert replay._recorded_rows == {}


def test_logits_are_computed_where_they_were_recorded(one, tmp_path):
    recording = one.recorded().write(tmp_path / "r").with_names(one.hf.graph.aliases)
    (batch,) = make_batches(recording, sequences(recording), 10_000)
    judge = LocalJudge(one.hf, torch.float32, {entry.name for entry in recording.taps}, is_alone=True)
    wanted = {at for n in LENGTHS for at in range(n - 1, n + NUM_NEW - 1)} | set(range(max(LENGTHS) + NUM_NEW - 1))
    assert set(Replay(judge, batch).logit_positions) <= wanted
    nothing = LocalJudge(one.hf, torch.float32, {"model.embed_tokens"}, is_alone=True)
    assert Replay(nothing, batch).logit_positions == [0], "as few as there can be"


def test_ways_lead_from_a_tap_back_to_what_was_recorded(one):
    graph = one.hf.graph
    everything = {op.tap for op in graph}
    assert unrecorded_before(graph, everything) == {}
    assert unrecorded_before(graph, everything - {f"{PREFIX}mlp.act"}) == {
        f"{PREFIX}mlp.down_proj": (f"{PREFIX}mlp.act",)
    }
    coarse = {"model.layers.0.output", f"{PREFIX}output", "model.layers.2.output"}
    unrecorded = unrecorded_before(graph, coarse)
    assert unrecorded["model.layers.0.output"] is None, "its way begins at the tokens"
    inner = [op.tap for op in graph.of_layer(1) if op.kind is not Kind.CACHE and op.tap != f"{PREFIX}output"]
    assert list(unrecorded[f"{PREFIX}output"]) == inner
    assert unrecorded["model.layers.2.output"] is not None


# Products and attention in a sample of the rows.

SAMPLE = RowSample(num_rows=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_moe", "falcon_h1"])
def test_a_sample_judges_its_rows_as_all_rows_are_judged(bench, tmp_path, name, dtype):
    one = bench(name, dtype)
    recording = one.recorded().write(tmp_path / "r")
    whole, sampled = one.comparison(recording), one.comparison(recording, sample=SAMPLE)
    assert sampled.result.outcome is Outcome.PASS
    assert sampled.errors.keys() == whole.errors.keys()
    fewer = {key for key, errors in sampled.errors.items() if len(errors.rows) < len(whole.errors[key].rows)}
    dear = {op.tap for op in one.hf.graph if op.kind in (Kind.LINEAR, Kind.ATTENTION)} - one.hf.graph.head
    assert fewer <= dear
    assert len(fewer) > len(dear) / 2
    for key, errors in sampled.errors.items():
        others = dict(zip(whole.errors[key].rows.identities(), whole.errors[key].roundings.tolist(), strict=True))
        expected = [others[row] for row in errors.rows.identities()]
        assert errors.roundings.tolist() == near(expected, absolute=1e-6), key


def test_the_result_counts_the_rows_that_a_sample_leaves_out(one, tmp_path):
    recording = one.recorded().write(tmp_path / "r")
    run = one.compare(recording, sample=SAMPLE)
    coverage, judged = run.coverage, tap(run, f"{PREFIX}mlp.up_proj").num_rows
    assert coverage.rows_left_out == everywhere() - judged > 0
    assert coverage.least_rows_found == SAMPLE.least_found(max(LENGTHS) + NUM_NEW - 1)
    many = one.compare(recording, sample=RowSample(num_rows=1000)).coverage
    assert (many.rows_left_out, many.least_rows_found) == (0, None), "all of them are no sample"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["self_attn.v_proj", "attention", "mlp.up_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("row", [(0, 3), (0, 6), (1, 2), (2, 4)])
def test_one_wrong_row_stands_out_wherever_it_is(one, actual, tmp_path, name, row):
    """It is not drawn, and no step begins or ends there: as an engine's one wrong row, it changes what follows it."""
    for item in (f"{PREFIX}{name}", "model.layers.2.output", "model.norm"):
        actual.at(item, *row).mul_(1.5)
    run = one.compare(actual.write(tmp_path / "r"), sample=SAMPLE)
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == (f"{PREFIX}{name}", *row)


def test_a_product_that_was_not_recorded_in_every_row_is_judged_wherever_it_was(one, actual, tmp_path):
    without(actual, f"{PREFIX}mlp.up_proj", (2, 3))
    run = one.compare(actual.write(tmp_path / "r"), wanted=[], sample=SAMPLE)
    assert tap(run, f"{PREFIX}mlp.up_proj").num_rows == everywhere() - 1
    assert tap(run, f"{PREFIX}mlp.gate_proj").num_rows < everywhere() / 2
    assert run.outcome is Outcome.PASS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["plain", "chunked:3", "mixed:5", "batched", "preempted"])
def test_a_sample_alarms_under_no_schedule(one, tmp_path, schedule):
    recording = one.recorded(schedule, engine="reference").write(tmp_path / "r")
    run = one.compare(recording, sample=SAMPLE, wanted=[])
    assert run.outcome is Outcome.PASS
    assert run.coverage.rows_left_out > 0


LAYERS = ("model.embed_tokens", "*.output", "lm_head", "model.norm")
MODULES = (*LAYERS, "*layernorm", "*.o_proj", "*.attn_residual", "*.down_proj")


def keep(bench, patterns, schedule="mixed"):
    """A recording that holds only the taps that match, and their names."""
    copy = bench.recorded(schedule, engine="reference")
    names = [operation.tap for operation in bench.hf.graph]
    kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in names:
        if name not in kept:
            copy.drop(name)
    return copy, kept


def through(run):
    return {tap.name: len(tap.through) for tap in run.taps}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("patterns", [LAYERS, MODULES])
def test_a_sound_engine_passes(bench, tmp_path, name, dtype, patterns):
    bench = bench(name, dtype)
    copy, kept = keep(bench, patterns)
    run = bench.compare(copy.write(tmp_path / "r"), wanted=kept)
    assert run.findings == ()
    assert {tap.judged_by for tap in run.taps} == {"local"}
    assert max(tap.local_bound_share_max for tap in run.taps) < 0.8


def test_the_finest_that_the_recording_allows(bench, tmp_path):
    bench = bench("llama-tiny")
    for patterns, expected in ((LAYERS, 14), (MODULES, 3)):
        copy, kept = keep(bench, patterns)
        actual = through(bench.compare(copy.write(tmp_path / f"r{expected}"), wanted=kept))
        assert actual["model.layers.1.output"] == (expected if patterns is LAYERS else 0)
        assert actual["model.norm"] == actual["lm_head"] == 0
    assert actual["model.layers.1.mlp.down_proj"] == 3
    assert actual["model.layers.1.self_attn.o_proj"] == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_wrong_layers_are_each_found_and_no_other(bench, tmp_path, dtype):
    bench = bench("qwen3-tiny", dtype)
    copy, kept = keep(bench, LAYERS)
    wrong = {"model.layers.0.output": (1, 3), "model.layers.2.output": (0, 6)}
    for name, row in wrong.items():
        copy.at(name, *row).add_(1.0)
    run = bench.compare(copy.write(tmp_path / "r"), wanted=kept)
    assert run.outcome is Outcome.MISMATCH
    bad = {tap.name for tap in run.taps if tap.num_bad_rows}
    assert {*wrong} <= bad
    assert bad <= {*wrong, "model.layers.1.output", "model.norm"}  # what reads a row that was changed after its maker
    assert (run.first_divergence.tap, run.first_divergence.position) == ("model.layers.0.output", 3)
    assert run.first_divergence.code is Code.LOCAL_ERROR
    message = next(finding.message for finding in run.findings if finding.tap == "model.layers.0.output")
    assert "computed through 16 taps that were not recorded" in message
