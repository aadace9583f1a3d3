"""Drafts that are made for a schedule: right up to a position, and wrong there."""

from hypothesis import given
from hypothesis import strategies as st

from harness.engines import Workload
from harness.formats.recording import RequestInfo
from harness.formats.schedule import parse_schedule
from harness.oracle.requests import NUM_GIVEN_UP, draft_requests

REQUESTS = [
    RequestInfo(id=0, token_ids=list(range(3, 33)), prompt_length=8),
    RequestInfo(id=4, token_ids=[7] * 20, prompt_length=2),
    RequestInfo(id=2, token_ids=[5, 6, 7], prompt_length=3),
]


def test_a_request_goes_back_over_seven_tokens_after_its_prompt():
    drafts = draft_requests(REQUESTS, parse_schedule("rewound"))
    assert [(draft.id, draft.draft_of, draft.prompt_length) for draft in drafts] == [(5, 0, 8), (6, 4, 2)]
    assert {len(draft.token_ids) - draft.prompt_length for draft in drafts} == {NUM_GIVEN_UP}


def test_a_request_goes_back_over_fewer_tokens_than_it_has():
    for num_tokens, given_up in ((8, []), (9, []), (10, [1]), (15, [6]), (16, [7]), (17, [7])):
        request = RequestInfo(id=0, token_ids=list(range(num_tokens)), prompt_length=8)
        drafts = draft_requests([request], parse_schedule("rewound"))
        assert [len(draft.token_ids) - 8 for draft in drafts] == given_up


@given(st.integers(1, 9), st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_each_is_wrong_at_its_first_position_and_a_step_of_its_request_gives_it_up(num_drafts, prompt_length, tokens):
    request = RequestInfo(id=3, token_ids=tokens, prompt_length=min(prompt_length, len(tokens)))
    for name in ("rewound", f"speculative:{num_drafts}"):
        schedule = parse_schedule(name)
        drafts = draft_requests([request], schedule)
        assert drafts == draft_requests([request], schedule)
        for draft in drafts:
            at = draft.prompt_length
            assert draft.token_ids[:at] == tokens[:at]
            assert at >= request.prompt_length
            assert draft.token_ids[at] != tokens[at]
        steps = list(Workload(requests=[request], schedule=schedule, copies=drafts).steps(request))
        own = [position for step in steps for item, positions in step if item is request for position in positions]
        assert sorted(set(own)) == list(range(len(tokens)))
        assert len(own) - len(tokens) == (len(drafts) if name == "rewound" else 0)
        given_up = {
            (item.id, at) for step in steps for item, positions in step if item is not request for at in positions
        }
        assert given_up == {
            (draft.id, at) for draft in drafts for at in range(draft.prompt_length, len(draft.token_ids))
        }


def test_drafts_are_rejected_after_every_number_of_accepted_ones():
    drafts = draft_requests(REQUESTS[:1], parse_schedule("speculative:3"))
    steps = Workload(requests=REQUESTS, schedule=parse_schedule("speculative:3"), copies=drafts).steps(REQUESTS[0])
    accepted = [len(step[0][1]) - 1 for step in steps if len(step) > 1]
    assert sorted(accepted) == [0, 1, 2]
