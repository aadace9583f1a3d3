"""Rows that an earlier schedule had bit for bit: no second verdict, and the verdicts that all rows would have got."""

import pytest

from harness.formats.taps import Kind
from harness.judge.compare import local, seen
from harness.judge.compare.seen import SeenRows

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
    changed_copy = changed(bench().recorded("plain"), 1 + 2**-22)
    *_, (second, _) = judge(bench().recorded("plain"), changed_copy, known=SeenRows())
    views = [view for evidence in second.sound.values() for view in evidence.views]
    assert second.result.coverage.rows_seen_before
    assert [int(view.rows.request[0]) for view in views] == [REQUEST]
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
    known.num_judged_again = 2
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
