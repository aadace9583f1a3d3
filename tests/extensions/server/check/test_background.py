"""The truth beside the server's work: when it runs, what it is, and how it ends."""

import asyncio
import threading

import pytest
import torch

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.base.threads import limit_threads
from harness.extensions.server import truth as background
from harness.extensions.server.address import Address
from harness.extensions.server.check.run import check_endpoint
from harness.extensions.server.truth import BackgroundTruth, Walk, walk_truth
from harness.oracle.model import load_model
from harness.results.check import Outcome

from .conftest import VICTIM, make_plan


@pytest.fixture(scope="module")
def hf(folder):
    return load_model(folder, dtype=torch.float32)


def walk(*token_ids):
    return Walk(token_ids=token_ids, wanted={len(token_ids) - 1: frozenset([5])}, num_top=2)


def test_prompts_that_are_answered_are_forced_before_the_last_answer_comes(folder, server, monkeypatch):
    app, url = server
    is_forced = threading.Event()

    def forced(*args, **options):
        rows = walk_truth(*args, **options)
        is_forced.set()
        return rows

    async def late(inner, scope, receive, send, _body):
        if len(app_prompts) > 1:  # the probe comes first
            assert await asyncio.to_thread(is_forced.wait, 600)
        await inner(scope, receive, send)

    app_prompts = [[1, 20 + at, 31, 7, 9] for at in range(16)] + [VICTIM]
    monkeypatch.setattr(background, "walk_truth", forced)
    app.spoil = late
    result = check_endpoint(make_plan(folder, prompts=app_prompts, max_new_tokens=2), Address(url=url), num_again=0)
    assert result.outcome is Outcome.PASS
    assert result.runs[0].tokens.compared == 17 * 2


def test_it_is_the_truth_of_the_same_walks(hf):
    walks = {3: walk(1, 64, 155, 143), 0: walk(1, 20, 31)}
    # On as many threads: with a server here that depends on when the batch begins.
    with BackgroundTruth(hf, truth="auto", is_server_here=False) as truth:
        truth.add(walks)
        truth.add({7: walk(1, 5)})
        told = []
        rows = truth.finish(lambda *progress: told.append(progress))
    assert rows.keys() == {3, 0, 7}
    with limit_threads(hf.config.hidden_size):
        assert [rows[3], rows[0]] == walk_truth(hf, list(walks.values()))
    assert len(rows[7][1].top) == 2
    assert told in ([], [(3, 3)], [(2, 3), (3, 3)])  # the thread may have been done before anybody asked
    assert truth.seconds > 0


def test_what_a_forward_raises_is_raised_where_it_is_waited_for(hf, monkeypatch):
    def failing(*_args, **_options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(background, "walk_truth", failing)
    with BackgroundTruth(hf, truth="auto", is_server_here=True) as truth:
        truth.add({0: walk(1, 5)})
        with pytest.raises(RuntimeError, match="no memory"):
            truth.finish()
        with pytest.raises(RuntimeError, match="no memory"):
            truth.add({1: walk(1, 6)})


def test_a_forward_that_nobody_waits_for_ends_at_its_next_operation(hf, monkeypatch):
    is_running, is_left, num_operations = threading.Event(), threading.Event(), []

    def slow(hf, walks, *, truth, check):
        def checked():
            num_operations.append(1)
            is_running.set()
            assert is_left.wait(600)
            check()

        return walk_truth(hf, walks, truth=truth, check=checked)

    monkeypatch.setattr(background, "walk_truth", slow)
    with BackgroundTruth(hf, truth="auto", is_server_here=True) as truth:
        truth.add({0: walk(1, 5)})
        assert is_running.wait(600)
        truth._is_cancelled.set()  # as leaving the block does, which then waits for the thread
        is_left.set()
    assert len(num_operations) == 1
    assert truth.finish() == {}
