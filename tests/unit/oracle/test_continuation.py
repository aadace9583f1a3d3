"""A plain golden: HF's own run, which a check begins with, and its truth, which is made where it is asked for."""

import pytest
import torch

import harness.oracle.make_golden as making_module
from harness.errors import Code, HarnessError
from harness.judge.compare.align import Locator, Rows
from harness.oracle import continuation
from harness.oracle.continuation import is_shown_by_decode
from harness.oracle.decode import greedy_continuation
from harness.oracle.golden import NOISE_FILE, PLAIN, open_golden
from harness.oracle.make_golden import cached_golden, checked_golden, golden_key, make_golden, open_cached_golden
from harness.oracle.requests import Prompt, sampled_positions

PROMPTS = [
    Prompt(token_ids=tuple(range(20, 29)), max_new_tokens=4),
    Prompt(token_ids=(5, 9, 20, 31), max_new_tokens=1),
    Prompt(token_ids=(5, 9, 20, 31, 7), max_new_tokens=3, prompt_length=2),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "goldens"


@pytest.fixture
def made(monkeypatch):
    """Precisions of the goldens that are made."""
    precisions, make = [], make_golden

    def noting(*args, **options):
        precisions.append(options["truth"])
        return make(*args, **options)

    monkeypatch.setattr(making_module, "make_golden", noting)
    return precisions


def rows_of(golden, tap, request):
    """All rows of a tap and a request, in the order of their positions."""
    head = tap in golden.graph.head
    positions = torch.tensor([*(sampled_positions(request) if head else range(len(request.token_ids)))])
    asked = Rows(
        request=torch.full_like(positions, request.id), position=positions, step=torch.full_like(positions, -1)
    )
    places = Locator(golden.recording).find(tap, asked)
    assert bool((places[:, 0] >= 0).all()), tap
    return Locator(golden.recording).gather(tap, places).to(torch.float64)


@pytest.mark.parametrize("rows_together", [64, 2])
@pytest.mark.parametrize(("dtype", "distance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_a_plain_golden_has_every_row_of_hfs_own_run(load, tmp_path, monkeypatch, dtype, distance, rows_together):
    monkeypatch.setattr(continuation, "_DECODE_ROWS", rows_together)
    hf = load("qwen3-tiny", dtype)
    plain = make_golden(hf, PROMPTS, tmp_path / "plain", truth=PLAIN)
    truth = make_golden(hf, PROMPTS, tmp_path / "truth")
    for request, same_request, prompt in zip(plain.requests, truth.requests, PROMPTS, strict=True):
        new = greedy_continuation(hf, prompt.token_ids, prompt.max_new_tokens)
        assert request.token_ids == [*prompt.token_ids, *new[:-1]] == same_request.token_ids
        for tap in (op.tap for op in hf.graph if not op.is_kept):
            ours, theirs = (rows_of(golden, tap, request).flatten(1) for golden in (plain, truth))
            assert float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max()) < distance, tap
        chosen = torch.cat([step.sampled[step.request == request.id] for step in plain.recording.steps])
        logits = rows_of(plain, hf.graph.logits, request)
        assert chosen[chosen >= 0].tolist() == logits.argmax(dim=1).tolist()
    assert not plain.noise


def test_the_truth_is_made_at_the_first_demand_for_the_same_tokens(load, made):
    hf = load("qwen3-tiny")
    golden = checked_golden(hf, PROMPTS)
    assert golden.is_plain
    assert golden.at_hand is golden
    assert made == [PLAIN]
    truth = golden.truth
    assert made == [PLAIN, "auto"]
    assert [one.token_ids for one in truth.requests] == [one.token_ids for one in golden.requests]
    assert truth.noise
    assert golden.truth is golden.at_hand is truth.truth is truth
    assert not checked_golden(hf, PROMPTS).is_plain, "what is there is used"
    assert not open_cached_golden(hf, PROMPTS).is_plain
    assert len(made) == 2


def test_a_plain_golden_stays_in_the_cache(load, made):
    hf = load("qwen3-tiny")
    assert open_cached_golden(hf, PROMPTS) is None
    first = checked_golden(hf, PROMPTS)
    assert checked_golden(hf, PROMPTS).recording.path == open_cached_golden(hf, PROMPTS).recording.path
    assert open_cached_golden(hf, PROMPTS).recording.path == first.recording.path
    assert open_cached_golden(hf, PROMPTS).truth.noise
    assert made == [PLAIN, "auto"]


@pytest.fixture
def other_tokens(load):
    """A plain golden whose last token is another: two may tie, and another number of threads chooses the other one."""
    golden = checked_golden(load("qwen3-tiny"), PROMPTS[:1])
    golden.requests[0].token_ids[-1] += 1
    return golden


def test_a_truth_of_other_tokens_is_made_beside_the_one_that_is_there(load, other_tokens, made):
    there = cached_golden(load("qwen3-tiny"), PROMPTS[:1])
    assert other_tokens.truth.requests == other_tokens.requests
    assert made == ["auto", "auto"]
    assert open_golden(there.recording.path).requests == there.requests, "another process may be reading it"


def test_a_faster_process_may_have_made_the_truth_of_other_tokens(load, other_tokens, monkeypatch):
    make, hf = make_golden, load("qwen3-tiny")

    def made_meanwhile(*args, **options):
        monkeypatch.setattr(making_module, "make_golden", make)
        cached_golden(hf, PROMPTS[:1])
        return make(*args, **options)

    monkeypatch.setattr(making_module, "make_golden", made_meanwhile)
    assert other_tokens.truth.requests == other_tokens.requests


def test_noise_beside_a_plain_golden_is_refused(load, tmp_path):
    hf = load("qwen3-tiny")
    plain = make_golden(hf, PROMPTS[:1], tmp_path / "plain", truth=PLAIN)
    truth = make_golden(hf, PROMPTS[:1], tmp_path / "truth")
    (plain.recording.path / NOISE_FILE).write_bytes((truth.recording.path / NOISE_FILE).read_bytes())
    with pytest.raises(HarnessError) as caught:
        open_golden(plain.recording.path)
    assert caught.value.code is Code.DAMAGED_SAFETENSORS


def test_a_plain_golden_in_the_place_of_the_truth_is_made_again(load, cache, made):
    hf = load("qwen3-tiny")
    plain = checked_golden(hf, PROMPTS[:1])
    place = cache / making_module.key_name(golden_key(hf, PROMPTS[:1]))
    plain.recording.path.rename(place)
    golden = cached_golden(hf, PROMPTS[:1])
    assert golden.noise
    assert "made again" in golden.notes[0]


def test_what_decode_does_not_show_has_the_truth_from_the_beginning(load, made, monkeypatch):
    hf = load("qwen3-tiny")
    assert is_shown_by_decode(hf, PROMPTS)
    assert not is_shown_by_decode(hf, [Prompt(token_ids=(5,), max_new_tokens=1, inputs="0" * 64)])
    monkeypatch.setattr(continuation, "frequencies_follow_length", lambda _config: True)
    assert not is_shown_by_decode(hf, PROMPTS)
    assert not checked_golden(hf, PROMPTS[:1]).is_plain
    assert made == ["auto"]
