"""Engines that go back: rejected rows stand under their drafts' own ids, and all rows are judged."""

import pytest

import harness
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording

PROMPTS = [[*range(5, 41)], [33, 44, 55, 66]]
"""The first is longer than gemma3-tiny's window."""


def check(checkpoints, engine, name="qwen3-tiny", schedules=("rewound", "speculative"), **options):
    return harness.check(
        engine, model=checkpoints / name, prompts=PROMPTS, max_new_tokens=12, dtype="float32", schedules=schedules,
        **options,
    )  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "name"), [("hf", "gemma3-tiny"), ("reference", "qwen3-tiny")])
def test_every_row_is_judged_and_passes(checkpoints, engine, name):
    report = check(checkpoints, engine, name)
    assert report, report.text()
    for run in report.runs:
        assert "rewound" in run.coverage.triggers
        assert run.coverage.missing == 0
        assert not {"batch", "forked", "prefix_hit", "preempted"} & set(run.coverage.triggers)
    assert "drafts_accepted" in report.runs[1].coverage.triggers


@pytest.mark.parametrize("engine", ["hf", "reference"])
def test_rejected_rows_are_their_drafts_own(checkpoints, engine, tmp_path):
    check(checkpoints, engine, schedules=["speculative"], out=tmp_path / "out")
    with Recording.open(tmp_path / "out" / "speculative") as recording:
        drafts = [request for request in recording.manifest.requests if request.draft_of is not None]
        rows = [
            (request, position)
            for step in recording.steps
            if step.phase != "readback"
            for request, position in zip(step.request.tolist(), step.position.tolist(), strict=True)
        ]
        (verification, *_) = [step for step in recording.steps if drafts[0].id in step.request.tolist()]
    assert len(rows) == len(set(rows))
    for draft in drafts:
        positions = range(draft.prompt_length, len(draft.token_ids))
        assert [position for request, position in rows if request == draft.id] == list(positions)
    for request in recording.manifest.requests[:2]:
        assert sorted(at for owner, at in rows if owner == request.id) == list(range(len(request.token_ids)))
    assert (verification.sampled >= 0).all()  # every row of it chooses a token


def test_a_draft_is_shorter_than_its_request_and_so_fits_the_context(checkpoints):
    report = harness.check(
        "hf", model=checkpoints / "qwen3-tiny", prompts=[[5] * 508], max_new_tokens=4, schedules=["rewound"]
    )
    assert report, report.text()
    assert "rewound" in report.runs[0].coverage.triggers


def test_a_request_that_ends_too_soon_has_nothing_to_reject(checkpoints):
    report = harness.check(
        "hf", model=checkpoints / "qwen3-tiny", prompts=PROMPTS[:1], max_new_tokens=2, schedules=["speculative"]
    )
    messages = [finding.message for run in report.runs for finding in run.findings]
    assert "no request went back over tokens that it had given up (raise --max-new-tokens to at least 4)" in messages


def test_an_engine_that_does_not_go_back_is_not_asked_to(checkpoints):
    with pytest.raises(HarnessError, match="cannot follow the schedule 'rewound'"):
        check(checkpoints, "reference", engine_options={"attention_backend": "recompute"})


def test_a_cache_of_states_is_refused(checkpoints, monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.DynamicLayer.is_croppable", False, raising=False)
    with pytest.raises(HarnessError, match="DynamicCache holds states that cannot go back") as caught:
        check(checkpoints, "hf", schedules=["rewound"])
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE


def test_an_engine_that_claims_to_verify_and_does_not_fails(checkpoints, monkeypatch):
    monkeypatch.setattr("reference_engine.speculation.Speculation.propose", lambda *_: None)
    (run,) = check(checkpoints, "reference", schedules=["speculative"]).runs
    messages = {finding.message for finding in run.findings if finding.code is Code.TRIGGER_NOT_REACHED}
    assert "no step computed an accepted draft (raise --max-new-tokens to at least 4)" in messages
    assert any(finding.code is Code.ROWS_MISSING for finding in run.findings)
