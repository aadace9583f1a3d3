"""A thread that stays one part ahead: never at the same time, never left behind, and what it raises is raised here."""

import threading

import pytest
import torch

from harness.oracle.turns import Ahead


class BoomError(Exception):
    """Raised by the tests."""


def counting(said, num_parts):
    """A function of that many parts, which says what it does; `ahead` must be set before it runs."""

    def function():
        for part in range(num_parts):
            said.append(("ahead", part))
            function.ahead.wait()
        said.append(("ahead", "end"))

    function.ahead = Ahead(function)
    return function.ahead


def threads():
    return {thread.ident for thread in threading.enumerate()}


def test_the_two_take_turns():
    said = []
    ahead = counting(said, 3)
    for part in range(3):
        ahead.advance()
        said.append(("behind", part))
    ahead.finish()
    assert said == [(who, part) for part in range(3) for who in ("ahead", "behind")] + [("ahead", "end")]


def test_nothing_runs_before_it_is_asked_for():
    said, before = [], threads()
    ahead = counting(said, 1)
    assert said == []
    assert threads() <= before  # one that another test has left may end meanwhile
    ahead.cancel()


def test_what_it_raises_is_raised_where_it_is_advanced():
    before = threads()

    def function():
        ahead.wait()
        raise BoomError

    ahead = Ahead(function)
    ahead.advance()
    with pytest.raises(BoomError):
        ahead.advance()
    ahead.cancel()
    assert threads() <= before  # one that another test has left may end meanwhile


def test_what_is_over_stays_over():
    said = []
    ahead = counting(said, 1)
    ahead.finish()
    ahead.advance()
    ahead.finish()
    ahead.cancel()
    assert said == [("ahead", 0), ("ahead", "end")]


@pytest.mark.parametrize("num_advances", [0, 1, 2])
def test_cancel_ends_it_where_it_stands(num_advances):
    said, before = [], threads()
    ahead = counting(said, 3)
    for _ in range(num_advances):
        ahead.advance()
    ahead.cancel()
    assert threads() <= before  # one that another test has left may end meanwhile
    assert said == [("ahead", part) for part in range(num_advances)]
    ahead.cancel()


def test_cancel_unwinds_what_it_was_in():
    """Context managers of the model's code are left, and no handler of its own keeps it alive."""
    said, before = [], threads()

    def function():
        try:
            try:
                ahead.wait()
            except Exception:
                said.append("caught")
        finally:
            said.append("unwound")

    ahead = Ahead(function)
    ahead.advance()
    ahead.cancel()
    assert said == ["unwound"]
    assert threads() <= before  # one that another test has left may end meanwhile


def test_it_computes_with_as_many_threads_as_its_maker():
    """A new thread of torch's begins with the default, and products of other shares are other numbers."""
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(before + 1)
        ahead = Ahead(lambda: seen.append(torch.get_num_threads()))
        ahead.finish()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1]
