"""Loads and windows: which steps run, which are captured, and what is refused."""

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.load import CaptureSchedule, ProfileRequests, ProfileWorkload, dry_run, run_steps, window


def labels(steps):
    return [step.shape.label for step in steps]


def test_a_rehearsal_notes_every_step(session, load):
    steps = dry_run(session, load)
    assert labels(steps) == ["prefill[bs=2 toks=48 kv=0]", *(f"decode[bs=2 toks=2 kv={48 + 2 * i}]" for i in range(5))]
    assert steps[1].names == steps[2].names
    assert {"model.layers.2.attention", "model.layers.0.mlp.act", "lm_head"} <= set(steps[0].names)


def test_a_late_request_mixes_with_those_that_are_decoded(reference, load):
    late = ProfileRequests(prompts=load.prompts, max_new_tokens=(6, 6), late=tuple(range(7)))
    assert labels(dry_run(reference, late)) == ["prefill[bs=2 toks=48 kv=0]", "mixed[bs=3 toks=9 kv=48]"]


def test_a_request_ends_with_its_last_token(reference, load):
    uneven = ProfileRequests(prompts=load.prompts, max_new_tokens=(2, 4))
    decode = ["decode[bs=2 toks=2 kv=48]", "decode[bs=1 toks=1 kv=25]", "decode[bs=1 toks=1 kv=26]"]
    assert labels(dry_run(reference, uneven)) == ["prefill[bs=2 toks=48 kv=0]", *decode]


def test_an_engine_that_levels_requests_is_refused(open_on, load):
    uneven = ProfileRequests(prompts=load.prompts, max_new_tokens=(2, 4))
    with pytest.raises(HarnessError, match="goes on with a request that has all of its new tokens") as caught:
        dry_run(open_on("hf"), uneven)
    assert (caught.value.where, caught.value.expected, caught.value.actual) == ("request 0", "2 new tokens", 3)


def test_decode_begins_after_what_is_waited_for(reference, find_window):
    window = find_window(reference, "decode", wait=2, warmup=1, active=1)
    assert [step.index for step in window.steps] == [4]
    assert window.num_steps == 5
    assert window.runs == ((range(1, 2), range(2, 3), range(3, 4), range(4, 5)),)


def test_a_short_decode_is_captured_all_the_same(reference, find_window):
    assert [step.index for step in find_window(reference, "decode", wait=50).steps] == [5]


def test_prefill_is_waited_for_by_whole_runs(reference, find_window):
    window = find_window(reference, "prefill", wait=2, warmup=1)
    assert [step.index for step in window.steps] == [0]
    assert window.runs == ((range(0, 1),),) * 4


def test_a_phase_without_a_step_is_refused(reference):
    once = ProfileRequests(prompts=((1, 2, 3),), max_new_tokens=(1,))
    with pytest.raises(HarnessError, match="the phase 'decode' ran no step") as caught:
        window("decode", once, dry_run(reference, once), CaptureSchedule())
    assert caught.value.code is Code.PHASE_WITHOUT_STEP
    assert caught.value.actual == "1 step: prefill"


@pytest.mark.parametrize("arguments", [{"wait": -1}, {"warmup": -1}, {"active": 0}, {"repeat": 0}])
def test_an_impossible_schedule_is_refused(arguments):
    with pytest.raises(HarnessError, match="is too small"):
        CaptureSchedule(**arguments)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"num_prompt_tokens": 0}, {"max_new_tokens": -1}])
def test_an_impossible_workload_is_refused(arguments):
    with pytest.raises(HarnessError, match="must be positive"):
        ProfileWorkload(**arguments)


def test_a_workload_is_the_same_every_time():
    workload = ProfileWorkload(batch_size=2, num_prompt_tokens=9, max_new_tokens=3)
    requests = workload.load(50)
    assert requests == workload.load(50)
    assert [len(prompt) for prompt in requests.prompts] == [9, 9]
    assert workload.mixed_load(50).prompts == requests.prompts
    assert max(map(max, requests.prompts)) < 50


def test_requests_are_dropped_where_a_step_fails(session, load):
    def fail(_index):
        session.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_steps(session, load, fail)
    assert labels(dry_run(session, load))[0] == "prefill[bs=2 toks=48 kv=0]"
