"""Rows of a golden and what is kept of them, by hand."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.threads import Workers
from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.golden import LOGIT_NOISE
from harness.oracle.make_golden import _check_finite, _Dump, _prompt_key, _Rows
from harness.oracle.paired import Value
from harness.oracle.requests import Prompt

REQUESTS = [
    RequestInfo(id=4, token_ids=[1, 2, 3], prompt_length=2),
    RequestInfo(id=9, token_ids=[1, 2, 3, 4, 5], prompt_length=5),
    RequestInfo(id=2, token_ids=[7], prompt_length=1),
]
ROWS = _Rows.of(REQUESTS)
NORM = Operation(tap="norm", kind=Kind.NORM)
CHOICE = Operation(tap="choice", kind=Kind.CHOICE)
HEAD = Operation(tap="lm_head", kind=Kind.LINEAR, is_head=True, sampled_only=True)
HF = SimpleNamespace(graph=Graph((NORM, CHOICE, HEAD)), dtype=torch.bfloat16)


def test_rows_are_the_tokens_of_one_request_after_the_other():
    assert ROWS.request == [4] * 3 + [9] * 5 + [2]
    assert ROWS.position == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert ROWS.sampled == [1, 2, 7, 8]
    assert ROWS.places.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]


def test_a_prompts_key_names_what_was_given():
    assert _prompt_key(Prompt(token_ids=(1, 2), max_new_tokens=3)) == {"token_ids": [1, 2], "max_new_tokens": 3}
    longer = Prompt(token_ids=(1, 2), max_new_tokens=3, prompt_length=1)
    assert _prompt_key(longer) == {"token_ids": [1, 2], "max_new_tokens": 3, "prompt_length": 1}


class Written:
    """In the place of a writer: keeps the taps."""

    def __init__(self):
        self.taps = {}

    def tap(self, name, rows):
        self.taps[name] = rows


def dump():
    noise = {tap: [] for tap in ("norm", "choice", "lm_head", LOGIT_NOISE)}
    return _Dump(HF, ROWS, Written(), noise, Workers(0))


def shown(operation, rows, places=None):
    return Value(operation=operation, rows=rows, places=places)


def test_padding_is_left_out_and_the_controls_distance_kept():
    kept, rows = dump(), torch.randn(15, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept.control(shown(NORM, rows.bfloat16()))
    kept.truth(shown(NORM, rows))
    kept.finish()
    unpadded = rows[ROWS.places]
    assert torch.equal(kept.writer.taps["norm"], unpadded)
    (noise,) = kept.noise["norm"]
    distance = (unpadded.bfloat16().double() - unpadded).norm(dim=1) / unpadded.norm(dim=1)
    torch.testing.assert_close(noise, distance)
    assert kept.noise[LOGIT_NOISE] == []
    assert kept.choices == []


def test_logits_are_those_that_choose_a_token_wherever_they_stand():
    """HF was asked for positions 0, 1, 2 and 4 of each request."""
    rows = torch.randn(15, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    places = torch.tensor([request * 5 + at for request in range(3) for at in (0, 1, 2, 4)])
    low = (rows[places] * 1.5).float()
    kept = dump()
    kept.control(shown(HEAD, low, places))
    kept.truth(shown(HEAD, rows[places], places))
    kept.finish()
    chosen = rows[[1, 2, 9, 10]]
    assert torch.equal(kept.writer.taps["lm_head"], chosen)
    assert kept.choices == chosen.argmax(dim=1).tolist()
    (largest,), (noise,) = kept.noise[LOGIT_NOISE], kept.noise["lm_head"]
    torch.testing.assert_close(largest, (0.5 * chosen).abs().amax(dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(noise, torch.full((4,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_choice_has_no_noise_and_a_truth_may_have_no_control():
    kept = dump()
    chosen = torch.arange(30).view(15, 2)
    kept.control(shown(CHOICE, chosen))
    kept.truth(shown(CHOICE, chosen))
    kept.truth(shown(NORM, torch.ones(15, 2)))
    kept.finish()
    assert torch.equal(kept.writer.taps["choice"], chosen[ROWS.places])
    assert (kept.noise["choice"], kept.noise["norm"]) == ([], [])


def test_what_a_part_gave_is_written_while_the_next_one_runs():
    asked = []
    kept = dump()
    kept.disk = SimpleNamespace(submit=lambda _call: None, finished=lambda all_but: asked.append(all_but) or ())
    for num in (2, 0, 1):
        for _ in range(num):
            kept.truth(shown(NORM, torch.ones(15, 2)))
        kept.part_done()
    kept.finish()
    assert asked == [2, 0, 1, 0]


def test_hf_that_is_not_finite_is_no_judge():
    _check_finite(HF, {"norm": torch.zeros(2)})
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(HarnessError) as caught:
            _check_finite(HF, {"norm": torch.zeros(2), "lm_head": torch.tensor([0.0, wrong])})
        assert (caught.value.code, caught.value.where) == (Code.ORACLE_NOT_FINITE, "lm_head")
        assert "3.39e+38" in str(caught.value)
