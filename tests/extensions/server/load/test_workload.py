"""What a load is made of: when requests come, and how long they are."""

import itertools
import json
import math
import random
import statistics

import pytest

from harness.errors import Code, HarnessError
from harness.oracle.request_file import Arrivals, drawn_requests, parse_lengths, read_requests

IDS = range(3, 200)


def test_gaps_are_those_of_a_poisson_process():
    times = Arrivals(rate=50.0).times(20_000, random.Random(0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)  # as large as the mean: no evener, no burstier


def test_bursts_come_together_and_keep_the_rate():
    times = Arrivals(rate=50.0, burst=8).times(20_000, random.Random(0))
    assert len(set(times)) == 20_000 / 8
    assert times[-1] == pytest.approx(20_000 / 50, rel=0.1)


def test_an_infinite_rate_is_all_at_once():
    assert Arrivals(rate=math.inf).times(5, random.Random(0)) == [0.0] * 5


@pytest.mark.parametrize(
    ("text", "least", "most", "mean"), [("7", 7, 7, 7), ("3..9", 3, 9, 6), ("exp:20", 1, 10_000, 20.5)]
)
def test_lengths(text, least, most, mean):
    draw, rng = parse_lengths(text, "--new-tokens"), random.Random(0)
    drawn = [draw(rng) for _ in range(5_000)]
    assert least <= min(drawn) <= max(drawn) <= most
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "9..3", "0..4", "x", "exp:", "exp:0.5", "exp:nan", "exp:inf", "exp:1e300", "9" * 30, "1..2..3"],
)
def test_no_distribution(text):
    with pytest.raises(HarnessError, match="this is no distribution of lengths") as caught:
        parse_lengths(text, "--new-tokens")
    assert caught.value.code is Code.BAD_OPTION


def test_the_same_seed_draws_the_same_requests():
    def drawn(seed):
        lengths = parse_lengths("3..9", ""), parse_lengths("exp:5", "")
        return drawn_requests(20, *lengths, Arrivals(rate=3.0), ids=IDS, seed=seed)

    assert drawn(1) == drawn(1) != drawn(2)
    assert {token for request in drawn(1) for token in request.prompt.token_ids} <= set(IDS)


def read(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    lengths = parse_lengths("6", "")
    words = {"one two": (5, 6)}
    return read_requests(path, words.__getitem__, Arrivals(rate=4.0), ids=IDS, seed=0, max_tokens=lengths)


def test_requests_of_a_file(tmp_path):
    requests = read(
        tmp_path,
        {"prompt": "one two", "at": 2.5, "max_tokens": 3},
        "",
        {"prompt_token_ids": [7, 8, 9], "at": 1},
        {"prompt_tokens": 12, "at": 0},
    )
    assert [request.at_s for request in requests] == [0, 1, 2.5]
    assert [len(request.prompt.token_ids) for request in requests] == [12, 3, 2]
    assert [request.prompt.max_new_tokens for request in requests] == [6, 6, 3]
    assert requests[2].prompt.token_ids == (5, 6)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "this line is no JSON"),
        ([1], "this line has other fields"),
        ({"prompt": "one two", "temperature": 1}, "this line has other fields"),
        ({"max_tokens": 3}, "a line has one of prompt, prompt_token_ids and prompt_tokens"),
        ({"prompt": "one two", "prompt_tokens": 3}, "a line has one of prompt"),
        ({"prompt": 3}, "the prompt is neither text nor token ids"),
        ({"prompt_token_ids": [1, True]}, "the prompt is neither text nor token ids"),
        ({"prompt_token_ids": []}, "the prompt is neither text nor token ids"),
        ({"prompt_tokens": 0}, "prompt_tokens is no number from 1"),
        ({"prompt": "one two", "max_tokens": 2.5}, "max_tokens is no number from 1"),
        ({"prompt": "one two", "at": -1}, "at is no number from 0"),
        ('{"prompt": "one two", "at": NaN}', "no JSON|at is no number"),
    ],
)
def test_a_line_that_is_not_understood(tmp_path, line, says):
    with pytest.raises(HarnessError, match=says) as caught:
        read(tmp_path, {"prompt_tokens": 2}, line)
    assert "line 2" in str(caught.value.where)


def test_no_file_and_no_request(tmp_path):
    with pytest.raises(HarnessError, match="the file has no request"):
        read(tmp_path, "")
    (tmp_path / "requests.jsonl").unlink()
    with pytest.raises(HarnessError, match="the requests cannot be read"):
        read_requests(tmp_path / "none", len, Arrivals(rate=1.0), ids=IDS, seed=0, max_tokens=parse_lengths("1", ""))
