"""Rows by request and position whatever the order of the run, and by content, against loops over rows and tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo
from harness.judge.compare.align import Locator, Prefixes, Rows, all_rows, chunks, joined, match_requests, step_rows

from ....recording_writer import new_writer, requests_of
from .in_memory import Step, recording_of
from .judgements import rows_of

TAP, PARTIAL = "model.embed_tokens", "lm_head"


def rows_at(*pairs):
    request, position = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    return Rows(request=request, position=position, step=torch.zeros_like(request))


def write(path, requests, steps, *, partial=None):
    """A recording whose value at a row is 1000 * request + position + 0.1 * step; steps are lists of rows."""
    with new_writer(path, requests_of({id_: [1] * n for id_, n in requests.items()})) as writer:
        for index, step in enumerate(steps):
            chosen = list(partial(step)) if partial else []
            writer.begin_step(
                phase="prefill",
                request=[request for request, _ in step],
                position=[position for _, position in step],
                partial_rows={PARTIAL: chosen} if chosen else None,
            )
            values = torch.tensor([value(row, index) for row in step])
            writer.tap(TAP, values[:, None].expand(-1, 3).contiguous())
            if chosen:
                writer.tap(PARTIAL, values[chosen][:, None])
            writer.end_step()
    return Recording.open(path)


def recorded(path, tokens):
    """A recording of requests whose first one has a row at position 1."""
    with new_writer(path, requests_of(tokens)) as writer:
        writer.begin_step(phase="prefill", request=[min(tokens)], position=[1])
        writer.tap(TAP, torch.ones(1, 2))
        writer.end_step()
    return Recording.open(path)


def value(row, step):
    return 1000 * (row[0] % 97) + row[1] + step / 10


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_row_is_found_where_it_was_recorded_last(tmp_path_factory, data):
    ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4, unique=True))
    requests = {id_: data.draw(st.integers(1, 6)) for id_ in ids}
    every = [(id_, position) for id_, n in requests.items() for position in range(n)]
    steps = data.draw(
        st.lists(st.lists(st.sampled_from(every), min_size=1, max_size=6, unique=True), min_size=1, max_size=5)
    )
    has_partial = [data.draw(st.booleans()) for _ in steps]
    index = {id(step): flag for step, flag in zip(steps, has_partial, strict=True)}
    recording = write(
        tmp_path_factory.mktemp("aligned") / "r",
        requests,
        steps,
        partial=lambda step: range(0, len(step), 2) if index[id(step)] else (),
    )
    locator = Locator(recording)
    last = {tap: {} for tap in (TAP, PARTIAL)}
    running = dict.fromkeys(last, 0)
    for at, step in enumerate(steps):
        for row, name in enumerate(step):
            last[TAP][name] = (at, row, running[TAP] + row)
        running[TAP] += len(step)
        if has_partial[at]:
            for row, name in enumerate(step[::2]):
                last[PARTIAL][name] = (at, row, running[PARTIAL] + row)
            running[PARTIAL] += len(step[::2])
    wanted = data.draw(st.permutations(every))
    for tap, known in last.items():
        places = locator.find(tap, rows_at(*wanted))
        assert [tuple(row) for row in places.tolist()] == [known.get(name, (-1, -1, -1)) for name in wanted]
        recorded = locator.recorded(tap)
        for row, id_ in enumerate(sorted(requests)):
            assert int(locator.request_ids[row]) == id_
            assert [bool(x) for x in recorded[row, : requests[id_]]] == [
                (id_, position) in known for position in range(requests[id_])
            ]
        present = [name for name in wanted if name in known]
        if present:
            gathered = locator.gather(tap, locator.find(tap, rows_at(*present)))[:, 0]
            torch.testing.assert_close(gathered, torch.tensor([value(name, known[name][0]) for name in present]))


def test_a_tap_that_was_never_recorded_is_nowhere(tmp_path):
    locator = Locator(write(tmp_path / "r", {3: 2}, [[(3, 0), (3, 1)]]))
    assert locator.find("lm_head", rows_at((3, 0), (3, 1))).tolist() == [[-1] * 3] * 2
    assert not locator.recorded("lm_head").any()
    assert locator.taps() == [TAP]


def test_rows_that_lie_side_by_side_are_not_copied(tmp_path):
    recording = write(tmp_path / "r", {3: 6}, [[(3, position) for position in range(6)]])
    locator = Locator(recording)
    places = locator.find(TAP, rows_at((3, 2), (3, 3), (3, 4)))
    gathered = locator.gather(TAP, places)
    assert gathered[:, 0].tolist() == [3002, 3003, 3004]
    assert gathered.untyped_storage().nbytes() > gathered.nbytes, "a view"


def test_the_first_row_is_of_the_smallest_request_then_position():
    rows = rows_at((7, 0), (2, 9), (2, 4), (2**31 - 1, 0), (2, 1))
    everywhere = torch.ones(5, dtype=torch.bool)
    assert rows.first(everywhere) == 4
    assert rows.first(torch.tensor([True, True, True, True, False])) == 2
    assert rows.first(torch.tensor([True, True, False, False, False])) == 1
    assert rows.first(torch.tensor([True, False, False, True, False])) == 0
    assert rows.first(torch.tensor([False, False, False, True, False])) == 3


def test_rows_selected_and_joined():
    rows = rows_at((7, 0), (2, 9), (2, 4))
    assert len(Rows.concat([])) == 0
    joined = Rows.concat([rows.select(torch.tensor([2])), rows.select(torch.tensor([True, False, True]))])
    assert joined.position.tolist() == [4, 0, 4]
    assert joined.request.tolist() == [2, 7, 2]


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({3: [1, 2]}, {4: [1, 2]}, "different requests"),
        ({3: [1, 2]}, {3: [1, 2], 4: [2]}, "different requests"),
        ({3: [1, 2], 4: [1]}, {3: [1, 2]}, "different requests"),
        ({3: [1, 2, 9]}, {3: [1, 2, 8]}, "position 2"),
        ({3: [1, 2, 9]}, {3: [1, 2]}, "2 tokens"),
    ],
)
def test_recordings_of_other_prompts_are_refused(tmp_path, theirs, ours, said):
    expected, actual = (recorded(tmp_path / name, requests) for name, requests in (("theirs", theirs), ("ours", ours)))
    match_requests(expected, expected)
    with pytest.raises(HarnessError) as caught:
        match_requests(expected, actual)
    assert caught.value.code is Code.DIFFERENT_PROMPTS
    assert said in str(caught.value)


def test_requests_that_repeat_others_are_matched_by_their_tokens(tmp_path):
    theirs = recorded(tmp_path / "theirs", {3: [1, 2], 4: [1, 5, 6]})
    aliases = match_requests(theirs, recorded(tmp_path / "ours", {3: [1, 2], 4: [1, 5, 6], 8: [1, 5], 9: [1, 2]}))
    assert aliases == {8: 4, 9: 3}
    locator = Locator(theirs, aliases)
    assert locator.find(TAP, rows_at((9, 1), (3, 1), (8, 1)))[:, 0].tolist() == [0, 0, -1]


def test_of_a_pool_any_beginning_is_matched_whatever_its_id(tmp_path):
    theirs = recorded(tmp_path / "theirs", {0: [1, 2, 3], 1: [1, 5, 6]})
    aliases = match_requests(theirs, recorded(tmp_path / "ours", {0: [1, 5], 1: [1, 2]}), is_pool=True)
    assert aliases == {0: 1, 1: 0}
    locator = Locator(theirs, aliases)
    assert locator.find(TAP, rows_at((1, 1), (0, 1)))[:, 0].tolist() == [0, -1]
    with pytest.raises(HarnessError, match="H027"):
        match_requests(theirs, recorded(tmp_path / "foreign", {0: [1, 5, 7]}), is_pool=True)


# Parts that need no file.


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(2048, 0), (2047, 0), (1, 0), (5, 0)], [1, 2, 1]),
        ([(1, 64 << 20), (1, (64 << 20) - 1), (1, 1), (2047, 0)], [1, 2, 1]),
        ([(1, 1)] * 3, [3]),
        ([(2047, 0), (2047, 0), (2047, 0), (1, 0)], [2, 2]),
        ([(1, (64 << 20) - 2)] * 4, [2, 2]),
        ([], []),
    ],
)
def test_steps_are_grouped_until_they_hold_enough_rows_or_bytes(sizes, expected):
    steps = [Step([(0, 0)] * num_rows, num_bytes=num_bytes) for num_rows, num_bytes in sizes]
    grouped = list(chunks(steps))
    assert [len(chunk) for chunk in grouped] == expected
    assert [step for chunk in grouped for step in chunk] == steps


def test_tensors_are_joined_along_rows_and_one_is_not_copied():
    first, second = torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)
    assert joined([first]) is first
    assert torch.equal(joined([first, second]), torch.tensor([[0.0, 1, 2], [3, 4, 5], [0, 1, 2]]))


def test_rows_that_are_one_part_are_that_part():
    rows = rows_at((7, 0), (2, 9))
    assert Rows.concat([rows]) is rows
    assert Rows.concat([rows, rows]).step.tolist() == [0] * 4


def test_the_rows_of_a_step_and_of_a_tap_in_it():
    rows = [(8, 0), (3, 2), (8, 1), (5, 0)]
    taps = {"all": torch.zeros(4, 1), "some": torch.zeros(2, 1)}
    steps = [Step([(5, 0)]), Step(rows, taps=taps, rows_of={"some": [3, 1]})]
    recorded = recording_of({8: [1, 2], 3: [1, 2, 3], 5: [1]}, steps)
    for actual, expected in (
        (all_rows(recorded.steps[1]), rows),
        (step_rows(recorded.steps[1], "all"), rows),
        (step_rows(recorded.steps[1], "some"), [(5, 0), (3, 2)]),
    ):
        assert list(zip(actual.request.tolist(), actual.position.tolist(), strict=True)) == expected
        assert actual.step.tolist() == [1] * len(expected)
        assert {x.dtype for x in (actual.request, actual.position, actual.step)} == {torch.int64}


def test_a_row_that_was_only_read_back_was_not_computed():
    requests = {8: [1, 2, 3], 3: [1, 2], 5: [1]}
    steps = [Step([(8, 0), (3, 1)]), Step([(5, 0), (8, 2)], phase="readback"), Step([(8, 1)], phase="decode")]
    locator = Locator(recording_of(requests, steps))
    assert locator.computed.tolist() == [[False, True, False], [False] * 3, [True, True, False]]
    assert Locator(recording_of({}, [])).computed.shape == (0, 0)


def test_taps_that_were_recorded_at_the_same_rows_share_a_signature():
    x = torch.zeros(2, 1)
    steps = [
        Step([(0, 0), (0, 1)], taps={"a": x, "b": x, "c": x, "d": x[:1], "e": x[:1]}, rows_of={"d": [0], "e": [1]}),
        Step([(0, 2), (0, 3)], taps={"a": x, "b": x}),
    ]
    locator = Locator(recording_of({0: [1] * 4}, steps))
    assert locator.signature("a") == locator.signature("b")
    assert len({locator.signature(tap) for tap in ("a", "c", "d", "e")}) == 4
    assert locator.signature("nowhere") == ()
    assert locator.taps() == ["a", "b", "c", "d", "e"]
    for tap, expected in (("a", [1, 1, 1, 1]), ("c", [1, 1, 0, 0]), ("d", [1, 0, 0, 0]), ("e", [0, 1, 0, 0])):
        assert locator.recorded(tap).int().tolist() == [expected]


def test_the_finding_names_the_tokens_or_lengths_that_differ():
    def refused(theirs, ours):
        with pytest.raises(HarnessError) as caught:
            match_requests(recording_of({3: theirs}, []), recording_of({3: ours}, []))
        return str(caught.value)

    assert "token 9" in (said := refused([1, 9, 2], [1, 8, 2]))
    assert "token 8" in said
    assert "position 1" in said
    assert "3 tokens" in (said := refused([1, 9, 2], [1, 9]))
    assert "2 tokens" in said
    assert "position" not in said


def test_an_alias_may_be_the_id_of_another_original():
    steps = [Step([(0, 0), (1, 0)], taps={TAP: torch.zeros(2, 1)})]
    locator = Locator(recording_of({0: [5], 1: [6]}, steps), {0: 1, 1: 0})
    assert locator.find(TAP, rows_at((0, 0), (1, 0)))[:, 1].tolist() == [1, 0]


TOKENS = {9: (1, 2, 3), 4: (1, 2, 4, 3), 7: (2, 1), 30: (1, 2, 3), 5: (1,)}
PREFIXES = Prefixes([RequestInfo(id=id_, token_ids=list(ids), prompt_length=1) for id_, ids in TOKENS.items()])
ROWS = [(request, at) for request, tokens in TOKENS.items() for at in range(len(tokens))]


def test_rows_with_the_same_tokens_so_far_have_one_number():
    contents = [TOKENS[request][: at + 1] for request, at in ROWS]
    numbers = PREFIXES.of(rows_of(ROWS)).tolist()
    for one, ours in zip(contents, numbers, strict=True):
        for content_of_other, theirs in zip(contents, numbers, strict=True):
            assert (one == content_of_other) == (ours == theirs)
    assert sorted(set(numbers)) == list(range(PREFIXES.count))
    assert PREFIXES.count == len(set(contents))


def test_the_table_is_in_the_order_of_the_ids_and_ends_where_tokens_do():
    assert PREFIXES.table.shape == (5, 4)
    for row, request in enumerate(sorted(TOKENS)):
        known = PREFIXES.of(rows_of([(request, at) for at in range(len(TOKENS[request]))])).tolist()
        assert PREFIXES.table[row].tolist() == known + [-1] * (4 - len(known))
        for end in range(len(known) + 1):
            assert PREFIXES.up_to(request, end).tolist() == known[:end]


def test_nothing_at_all():
    nothing = Prefixes([])
    assert (nothing.count, tuple(nothing.table.shape)) == (0, (0, 0))
    assert nothing.table.dtype is torch.int64
