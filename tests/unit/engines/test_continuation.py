"""Prompts continued through whatever an adapter offers: each gets the tokens that it asked for, and no more."""

from types import SimpleNamespace

import pytest

from harness.engines import Capabilities
from harness.engines.stepping import Continuation, open_session
from harness.errors import Code, HarnessError

PROMPTS, LENS = [[1, 2], [3]], [2, 3]


class Session:
    """Each step gives every request its number times ten plus the step; request 7 is the first."""

    def __init__(self):
        self.live, self.num_steps, self.stops, self.is_closed = [], 0, 0, False

    def add(self, prompt, max_new_tokens):
        self.live.append(7 + len(self.live))
        return self.live[-1]

    def step(self):
        self.num_steps += 1
        return {request: 10 * request + self.num_steps for request in self.live}

    def stop(self):
        self.live, self.stops = [], self.stops + 1

    def close(self):
        self.is_closed = True


def engine(**methods):
    return SimpleNamespace(name="mine", capabilities=Capabilities(schedules=("plain",)), run=None, **methods)


def stepped(session):
    return Continuation(engine(open_session=lambda **limits: session), max_num_tokens=8, max_num_seqs=2)


def test_each_step_yields_its_tokens_until_every_prompt_has_enough():
    session = Session()
    continuation = stepped(session)
    assert continuation.shows_steps
    assert list(continuation.steps(PROMPTS, LENS)) == [[(0, 71), (1, 81)], [(0, 72), (1, 82)], [(1, 83)]]
    assert (session.num_steps, session.stops) == (3, 1)
    continuation.close()
    assert session.is_closed


def test_limits_reach_the_engine():
    seen = {}
    Continuation(
        engine(open_session=lambda **limits: seen.update(limits) or Session()), max_num_tokens=8, max_num_seqs=2
    )
    assert seen == {"max_num_tokens": 8, "max_num_seqs": 2}


def test_without_steps_all_tokens_come_at_once():
    continuation = Continuation(
        engine(generate=lambda prompts, lens: [[4] * count for count in lens]), max_num_tokens=8, max_num_seqs=2
    )
    assert not continuation.shows_steps
    assert list(continuation.steps(PROMPTS, LENS)) == [[(0, 4), (0, 4), (1, 4), (1, 4), (1, 4)]]


def test_an_engine_with_neither_is_told_so():
    with pytest.raises(HarnessError, match="cannot continue a prompt") as caught:
        Continuation(engine(), max_num_tokens=8, max_num_seqs=2)
    assert caught.value.code is Code.ENGINE_LACKS_METHOD
    assert caught.value.expected == "open_session or generate"


def test_a_session_that_says_numbers_alone_cannot_be_compared_and_is_stopped():
    session = Session()
    session.step = lambda: [7, 8]
    with pytest.raises(HarnessError, match="does not say its tokens") as caught:
        list(stepped(session).steps(PROMPTS, LENS))
    assert caught.value.code is Code.ENGINE_LACKS_METHOD
    assert session.stops == 1


def test_a_session_that_makes_no_token_is_not_waited_for_for_good():
    session = Session()
    session.step = dict
    with pytest.raises(HarnessError, match="without a new token") as caught:
        list(stepped(session).steps(PROMPTS, LENS))
    assert caught.value.code is Code.ENGINE_FAILED
    assert caught.value.expected == "5 more tokens for 2 prompts"


@pytest.mark.parametrize("method", ["open_session", "generate"])
def test_whatever_the_engine_raises_names_it(method):
    def fails(*_args, **_kwargs):
        raise ZeroDivisionError("pages")

    with pytest.raises(HarnessError, match="pages") as caught:
        list(Continuation(engine(**{method: fails}), max_num_tokens=8, max_num_seqs=2).steps(PROMPTS, LENS))
    assert (caught.value.code, caught.value.where) == (Code.ENGINE_FAILED, "mine")


def test_a_profile_says_what_a_session_lacks_to_be_watched_and_closes_it():
    session = Session()
    session.phases, session.model = ("decode",), None
    with pytest.raises(HarnessError, match="no watching and no weights and no cache_tensors") as caught:
        open_session(engine(open_session=lambda **limits: session), max_num_tokens=8, max_num_seqs=2)
    assert caught.value.code is Code.ENGINE_LACKS_METHOD
    assert session.is_closed


def test_profiles_see_the_numbers_of_requests_whatever_a_session_returns():
    session = Session()
    session.phases = session.model = session.watching = session.weights = session.cache_tensors = None
    opened = open_session(engine(open_session=lambda **limits: session), max_num_tokens=8, max_num_seqs=2)
    opened.add([1], 2)
    opened.add([2], 2)
    assert opened.step() == [7, 8]
