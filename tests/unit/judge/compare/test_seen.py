"""Rows that an earlier schedule had bit for bit: no second verdict, and the verdicts that all rows would have got."""

from dataclasses import fields, replace

import pytest
import torch

from harness.formats.taps import Kind
from harness.judge.compare import compare_run, local, propagated, seen
from harness.judge.compare.seen import SeenRows
from harness.oracle import sketch_rows as sketches
from harness.oracle.make_golden import cached_golden
from harness.oracle.requests import Prompt

from .conftest import NUM_NEW

TAP = "model.layers.1.mlp.down_proj"
REQUEST, POSITION = 0, 5


@pytest.fixture
def judge(bench, tmp_path, monkeypatch):
    """Judge copies of recordings one after the other; return results, and the rows that were judged in each."""
    add, num = local.LocalJudge.add, []
    monkeypatch.setattr(local.LocalJudge, "add", lambda self, rows: (num.append(len(rows.places)), add(self, rows)))

    def run(*copies, known=None):
        for at, copy in enumerate(copies):
            num.clear()
            recording = copy.write(tmp_path / f"{at}-{known is None}")
            comparison = bench().comparison(recording, seen=known)
            yield comparison, sum(num)

    return run


def figures(comparison):
    return {
        tap: {
            row: values
            for row, *values in zip(
                errors.rows.identities(), errors.roundings.tolist(), errors.bound.tolist(), strict=True
            )
        }
        for tap, errors in comparison.errors.items()
    }


def changed(copy, factor):
    copy.at(TAP, REQUEST, POSITION).mul_(factor)
    return copy


def test_every_figure_is_that_of_all_rows_judged(bench, judge):
    schedules = ("plain", "batched", "chunked:3", "plain")
    copies = [bench().recorded(schedule) for schedule in schedules]
    pairs = list(zip(judge(*copies), judge(*copies, known=SeenRows()), strict=True))
    for (alone, _), (after, _) in pairs:
        effects = [{tap: errors.effect for tap, errors in run.errors.items()} for run in (alone, after)]
        assert list(effects[1].items()) == list(effects[0].items())
        ours, theirs = figures(after), figures(alone)
        for tap in theirs:  # attention's sums in float64 have another order where other sequences stand beside a row
            is_sum = bench().hf.graph[tap].kind is Kind.ATTENTION
            assert ours[tap] == (
                {row: pytest.approx(v, rel=1e-6, abs=1e-6) for row, v in theirs[tap].items()} if is_sum else theirs[tap]
            )
        assert after.result.outcome is alone.result.outcome
        assert after.result.num_rows == alone.result.num_rows
    (_, num_rows), (last, num_judged) = pairs[-1]
    assert (num_judged, last.result.coverage.rows_seen_before) == (0, last.result.num_rows)
    assert 0 < pairs[2][1][1] <= num_rows


def test_a_row_and_all_that_read_it_are_judged_again(bench, judge):
    sound, rounded = bench().recorded("plain"), changed(bench().recorded("plain"), 1 + 2**-22)
    (first, _), (second, _) = judge(sound, rounded, known=SeenRows())
    lengths = [len(request.token_ids) for request in bench().golden.requests]
    after = lengths[REQUEST] - POSITION
    computed = first.result.num_rows
    assert not second.result.findings
    assert computed - after - 1 <= second.result.coverage.rows_seen_before <= computed - after


def test_a_seen_row_is_still_of_its_step_where_attention_reads_it(bench, judge):
    known = SeenRows()
    runs = judge(bench().recorded("plain"), changed(bench().recorded("plain"), 1 + 2**-22), known=known)
    next(runs)
    known.num_for_power = 4
    second, _ = next(runs)
    views = [view for evidence in second.sound.values() for view in evidence.views]
    assert second.result.coverage.rows_seen_before
    assert views
    assert all(bool((view.key_step >= 0).all()) for view in views)


def test_no_sequence_runs_again_whose_rows_were_all_seen(bench, judge, monkeypatch):
    make, requests = local.make_batches, []

    def noted(recording, sequences, *args, **options):
        requests.append(sorted(sequence.request.id for sequence in sequences))
        return make(recording, sequences, *args, **options)

    monkeypatch.setattr(local, "make_batches", noted)
    known, sound = SeenRows(), bench().recorded("plain")
    runs = judge(sound, changed(bench().recorded("plain"), 1 + 2**-22), sound, sound, known=known)
    for _ in range(3):
        next(runs)
    known.num_for_power = 48
    next(runs)
    assert requests == [[0, 1, 2], [REQUEST], [], [0, 2]]


def test_a_wrong_row_is_wrong_in_every_schedule(bench, judge):
    copies = [changed(bench().recorded("plain"), 1.5) for _ in range(2)]
    sound = bench().recorded("plain")
    results = [comparison.result for comparison, _ in judge(sound, *copies, known=SeenRows())]
    (alone, _), *_ = judge(copies[0])
    assert results[1].findings == results[2].findings == alone.result.findings != ()
    assert [result.coverage.rows_seen_before for result in results] == [0, 0, 0]


def test_no_row_is_known_where_its_rotation_follows_the_length(bench, judge, monkeypatch):
    monkeypatch.setattr(seen, "_ROTATIONS_BY_LENGTH", ("'qwen3'",))
    results = [comparison.result for comparison, _ in judge(*[bench().recorded("plain")] * 2, known=SeenRows())]
    assert [result.coverage.rows_seen_before for result in results] == [0, 0]


def test_one_bit_of_any_tap_makes_another_row_of_it_and_of_all_that_read_it(bench, tmp_path):
    known, hf = SeenRows(), bench().hf
    sound = bench().recorded("plain").write(tmp_path / "sound").with_names(hf.graph.aliases)
    taps = [tap.name for tap in sound.taps]
    first = known.number(sound, hf, taps)
    known._sound.update(first.numbers.tolist())
    assert known.number(sound, hf, taps).num_seen == len(first.rows)
    last = max(at for request, at in first.rows.places() if request == REQUEST)
    sampled_only = {op.tap for op in hf.graph if op.sampled_only}
    for at, tap in enumerate(taps):
        copy, position = bench().recorded("plain"), last if tap in sampled_only else POSITION
        if not any(tap in step.taps for step in copy.computing()):
            continue
        copy.at(tap, REQUEST, position).view(torch.int32)[..., -1] ^= 1
        numbered = known.number(copy.write(tmp_path / f"{at}").with_names(hf.graph.aliases), hf, taps)
        others = set(numbered.rows.select(~numbered.is_seen).places())
        assert others == {(REQUEST, after) for after in range(position, last + 1)}, tap


def test_the_same_bytes_of_another_dtype_are_other_rows(bench, tmp_path):
    one, known = bench(dtype=torch.bfloat16), SeenRows()
    sound, relabelled = one.recorded("plain"), one.recorded("plain")
    for step in relabelled.computing():
        step.taps[TAP] = step.taps[TAP].view(torch.float16)
    assert not one.compare(sound.write(tmp_path / "sound"), seen=known).findings
    result = one.compare(relabelled.write(tmp_path / "relabelled"), seen=known)
    assert [finding.tap for finding in result.findings][:1] == [TAP]


@pytest.fixture
def sketched(one, monkeypatch, tmp_path):
    """A golden that holds sketches of narrow rows."""
    monkeypatch.setattr(sketches, "PROJECTIONS_A_ROW", 24)
    monkeypatch.setattr(sketches, "_LEAST_WIDTH", 0)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    sketches._directions.cache_clear()
    prompts = [
        Prompt(token_ids=tuple(request.token_ids[: request.prompt_length]), max_new_tokens=NUM_NEW)
        for request in one.golden.requests
    ]
    yield cached_golden(one.hf, prompts)
    sketches._directions.cache_clear()


def not_a_number(copy):
    copy.at(TAP, REQUEST, POSITION)[0] = torch.nan
    return copy


def test_distances_to_the_golden_are_measured_once_and_those_of_all_rows(one, sketched, monkeypatch, tmp_path):
    measure, num_measured = propagated.estimated_metrics, []

    def noted(actual, expected):
        num_measured.append(len(actual))
        return measure(actual, expected)

    monkeypatch.setattr(propagated, "estimated_metrics", noted)
    assert TAP in sketched.sketched
    known = SeenRows()
    copies = [
        one.recorded("plain"),
        one.recorded("batched"),
        changed(one.recorded("plain"), 1.5),
        not_a_number(one.recorded("plain")),
        one.recorded("prefix-hit", engine="reference"),
        one.recorded("plain"),
    ]
    nums = []
    for at, copy in enumerate(copies):
        recording = copy.write(tmp_path / f"copy-{at}")
        alone = compare_run(recording, sketched, hf=one.hf).result
        num_measured.clear()
        after = compare_run(recording, sketched, hf=one.hf, seen=known).result
        nums.append(sum(num_measured))
        for ours, theirs in zip(after.taps, alone.taps, strict=True):
            assert of_golden(ours) == of_golden(theirs)
        assert after.positions == alone.positions
        assert after.logits == alone.logits
    assert nums[0] > nums[2] > 0
    assert nums[-1] == 0


def of_golden(tap):
    names = (field.name for field in fields(tap) if field.name.startswith(("propagated", "sqnr", "cosine", "num_nan")))
    return tap.name, {name: repr(getattr(tap, name)) for name in names}


def test_a_distance_to_another_row_of_the_golden_is_another(one, sketched, tmp_path):
    """Requests with the same tokens: what was recorded of them is equal, and the golden's rows need not be."""
    known, actual = SeenRows(), one.recorded("plain").write(tmp_path / "a").with_names(one.hf.graph.aliases)
    numbered = known.number(actual, one.hf, [TAP])
    locator = propagated.Locator(sketched.recording)
    located = propagated._Located(actual, locator, numbered.contents)
    pair = located.pair([actual.steps[0]], TAP)
    distances = numbered.seen.distances(sketched.recording)
    sizes = []

    def measured(tap, part):
        sizes.append(len(part.rows))
        ratio = part.places[:, 2].double()
        metrics = propagated.estimated_metrics(*part.values(tap))
        return propagated.PropagatedErrors(rows=part.rows, metrics=metrics, ratio=ratio)

    first = distances.of(TAP, located, pair, measured)
    moved = replace(pair, places=pair.places.roll(1, dims=0))
    second = distances.of(TAP, located, moved, measured)
    assert sizes == [len(pair.rows)] * 2
    assert first.ratio.tolist() == pair.places[:, 2].tolist()
    assert second.ratio.tolist() == moved.places[:, 2].tolist()
