"""Schedules: what may be written, what they require, and what they can reach."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import Code, HarnessError
from harness.formats.schedule import DEFAULT_CHUNK_SIZE, ScheduleKind, parse_schedule, parse_schedules


@pytest.mark.parametrize(
    ("text", "is_batched", "chunk_size", "requires"),
    [
        ("plain", False, None, ("decode",)),
        ("chunked", False, DEFAULT_CHUNK_SIZE, ("decode", "chunked_prefill")),
        ("chunked:32", False, 32, ("decode", "chunked_prefill")),
        ("batched", True, None, ("decode", "batch")),
        ("mixed", True, DEFAULT_CHUNK_SIZE, ("decode", "chunked_prefill", "batch")),
        ("mixed:1", True, 1, ("decode", "chunked_prefill", "batch")),
        ("rewound", False, None, ("decode", "rewound")),
        ("speculative", False, None, ("decode", "rewound", "drafts_accepted")),
        ("speculative:5", False, None, ("decode", "rewound", "drafts_accepted")),
    ],
)
def test_what_is_written_is_what_is_meant(text, is_batched, chunk_size, requires):
    schedule = parse_schedule(text)
    assert (schedule.is_batched, schedule.chunk_size, schedule.requires) == (is_batched, chunk_size, requires)
    assert str(schedule) == text
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "fancy", "PLAIN", "plain:", "plain:4", "batched:4", "chunked:", "chunked:0", "chunked:-1",
             "chunked:1.5", "rewound:2", "speculative:0", "chunked:four", "chunked:4:4", "chunked:" + "9" * 10_000]
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(HarnessError) as caught:
        parse_schedule(text)
    assert caught.value.code is Code.BAD_OPTION
    assert caught.value.actual == text


@given(st.text())
def test_any_text_is_a_schedule_or_an_error_of_ours(text):
    with suppress(HarnessError):
        assert parse_schedule(text).kind in ScheduleKind


def test_several_are_repeated_or_listed_and_each_is_there_once():
    chosen = parse_schedules(["plain, chunked:3", "chunked", "chunked:7", "plain"])
    assert [str(schedule) for schedule in chosen] == ["plain", "chunked:3", "chunked"]


@pytest.mark.parametrize("texts", [["plain,"], [",plain"], ["plain,,batched"], [""]])
def test_an_empty_place_in_a_list_is_refused(texts):
    with pytest.raises(HarnessError):
        parse_schedules(texts)


@pytest.mark.parametrize(
    ("text", "lengths", "is_reachable"),
    [
        ("plain", [1], True),
        ("batched", [5], False),
        ("batched", [5, 1], True),
        ("chunked:5", [5], False),
        ("chunked:5", [1, 6], True),
        ("mixed:5", [6], False),
        ("mixed:5", [6, 1], True),
    ],
)
def test_what_prompts_can_reach(text, lengths, is_reachable):
    assert parse_schedule(text).is_reachable(lengths) is is_reachable
