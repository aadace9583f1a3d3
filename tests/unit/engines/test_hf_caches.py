"""HF's own cache, forked in decode and lost: keys and values, windows, and states of recurrences."""

import pytest

import harness
from harness.engines.hf import open_engine
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording

PROMPTS = [[*range(5, 41)], [33, 44, 55, 6]]
"""The first is longer than every window; the shorter one is padded."""
SCHEDULES = ("forked", "preempted")
FAMILIES = ("llama", "gemma2", "gemma3_text", "gpt2", "mamba", "falcon_h1", "axk2", "qwen3_moe")


def check(folder, schedules=SCHEDULES, *, prompts=PROMPTS, max_new_tokens=7, **options):
    return harness.check(
        "hf", model=folder, prompts=prompts, max_new_tokens=max_new_tokens, dtype="float32", schedules=schedules,
        **options,
    )  # fmt: skip


def computed(folder):
    """Rows of each step, and whether they were read back."""
    with Recording.open(folder) as recording:
        return [
            (list(zip(step.request.tolist(), step.position.tolist(), strict=True)), step.phase)
            for step in recording.steps
        ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_judged_and_passes(tiny_folder, family):
    report = check(tiny_folder(family))
    assert report, report.text()
    for run, trigger in zip(report.runs, SCHEDULES, strict=True):
        assert trigger in run.coverage.triggers
        assert run.coverage.missing == 0


def test_a_fork_goes_on_beside_its_original(tiny_folder, tmp_path):
    """Its first row is the token after the prompt, in the same step; what was before it is computed once."""
    check(tiny_folder("llama"), ["forked"], out=tmp_path / "out")
    steps = [rows for rows, phase in computed(tmp_path / "out" / "forked") if phase != "readback"]
    assert sorted(steps[0]) == [(request, at) for request in (0, 1) for at in range(len(PROMPTS[request]))]
    assert steps[1] == [(0, 36), (1, 4), (2, 36), (3, 4)]
    assert len(steps) == 7
    with Recording.open(tmp_path / "out" / "forked") as recording:
        tokens = {request.id: request.token_ids for request in recording.manifest.requests}
    for original, fork in ((0, 2), (1, 3)):
        begin = len(PROMPTS[original])
        assert tokens[fork][: begin + 1] == tokens[original][: begin + 1]
        assert tokens[fork][begin + 1] != tokens[original][begin + 1]


@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_the_states_of_a_fork_are_read_when_it_is_made(tiny_folder, tmp_path, family):
    check(tiny_folder(family), ["forked"], out=tmp_path / "out")
    steps = computed(tmp_path / "out" / "forked")
    first = next(at for at, (rows, _) in enumerate(steps) if (2, 36) in rows)
    assert ([(2, 35), (3, 3)], "readback") in steps[:first]


def test_a_request_that_is_lost_is_computed_again_alone(tiny_folder, tmp_path):
    check(tiny_folder("llama"), ["preempted"], out=tmp_path / "out")
    steps = [rows for rows, phase in computed(tmp_path / "out" / "preempted") if phase != "readback"]
    assert [len(rows) for rows in steps] == [40, 2, 2, 2, 1, 1, 1, 7, 1, 1, 1], "three of six decode steps side by side"
    assert [rows[0] for rows in steps[4:7]] == [(0, 39), (0, 40), (0, 41)]
    assert steps[7] == [(1, at) for at in range(7)]
    assert steps[8:] == [[(1, 7)], [(1, 8)], [(1, 9)]]
    read = [rows for rows, phase in computed(tmp_path / "out" / "preempted") if phase == "readback"]
    assert [(rows[0], rows[-1]) for rows in read] == [((0, 0), (0, 41)), ((1, 0), (1, 9))], "once, at their ends"


@pytest.mark.parametrize(("schedule", "num_new"), [("forked", 1), ("preempted", 1), ("preempted", 2)])
def test_what_ends_too_early_does_not_reach_its_schedule(tiny_folder, schedule, num_new):
    report = check(tiny_folder("llama"), [schedule], max_new_tokens=num_new)
    said = {
        "forked": "no request went on from one that was still running",
        "preempted": "no request lost its cache",
    }
    messages = [finding.message for finding in report.runs[0].findings if finding.code is Code.TRIGGER_NOT_REACHED]
    assert any(message.startswith(said[schedule]) for message in messages)


def test_requests_that_hf_cannot_mask_are_lost_one_by_one(tiny_folder):
    report = check(tiny_folder("rwkv"), ["preempted"])
    assert [finding.code for finding in report.runs[0].findings] == [Code.TRIGGER_NOT_REACHED], "there is no batch"
    assert "preempted" in report.runs[0].coverage.triggers


def test_a_cache_that_is_not_hfs_own_cannot_be_forked(tiny_folder):
    """RWKV's is a list of its states."""
    with pytest.raises(HarnessError) as raised:
        check(tiny_folder("rwkv"), ["forked"])
    assert raised.value.code is Code.ENGINE_CANNOT_SERVE
    assert "cannot be copied by request" in str(raised.value)


def test_it_says_that_it_can(tiny_folder):
    engine = open_engine(tiny_folder("llama"), dtype="float32", device="cpu", options={})
    assert set(SCHEDULES) <= set(engine.capabilities.schedules)
