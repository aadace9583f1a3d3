"""Requests with images: sound runs pass, and what is done wrongly around an image is found there and named."""

from collections.abc import Iterator

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.judge.compare.align import match_requests
from harness.oracle.decode import greedy_continuation
from harness.results.check import Outcome

from .images import FAMILIES, FAULTS, SCHEDULES, Subject, fault_row, processed, sound_rows, subject

QUICK = ("a chunk counts an image anew", "image rows one late")


@pytest.fixture(scope="module")
def qwen() -> Iterator[Subject]:
    with subject("qwen2_5_vl", "float32") as opened:
        yield opened


def test_a_chunk_may_end_inside_of_an_image(qwen: Subject) -> None:
    run = qwen.check("chunked:3")

    merged = next(tap for tap in run.taps if tap.name == "model.language_model.layers.0.input")
    assert run.outcome is Outcome.PASS
    assert merged.num_rows == sum(len(request.token_ids) for request in qwen.golden.requests)


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_around_an_image_is_named(qwen: Subject, name: str) -> None:
    (fault,) = [item for item in FAULTS if item.name == name]

    *_, detected, _, is_there, word, said = fault_row(qwen, "qwen2_5_vl", "float32", fault)

    assert (detected, is_there, word) == ("yes", "yes", "named"), said


def test_text_after_another_request_with_an_image_has_its_own_positions(qwen: Subject) -> None:
    hf, tokens = qwen.oracle, list(range(20, 30))
    expected = greedy_continuation(hf, tokens, 4)

    hf.model.model.rope_deltas = torch.tensor([[-7]])  # as HF leaves it behind a request with an image
    actual = greedy_continuation(hf, tokens, 4)

    assert actual == expected


def test_requests_of_other_images_are_other_requests(qwen: Subject) -> None:
    recording = qwen.golden.recording
    first, text, last = recording.manifest.requests
    assert first.inputs != last.inputs
    assert first.token_ids[: first.prompt_length] == last.token_ids[: last.prompt_length]
    swapped = recording.manifest.model_copy(
        update={"requests": [first.model_copy(update={"inputs": last.inputs}), text, last]}
    )

    class Actual:
        manifest, path = swapped, recording.path

    with pytest.raises(HarnessError) as caught:
        match_requests(recording, Actual())

    assert caught.value.code is Code.DIFFERENT_PROMPTS
    assert caught.value.what == "request 0 holds different images"


def test_what_a_request_needs_beside_its_image_is_asked_for(qwen: Subject) -> None:
    from harness.api.arguments import requests_of
    from harness.oracle.images import check_inputs, keep_inputs

    inputs = processed(qwen.oracle.model.config, [(4, 4)], seed=0)
    tokens = inputs["input_ids"][0].tolist()

    def request(**changes: torch.Tensor | None) -> RequestInfo:
        changed = {name: value for name, value in {**inputs, **changes}.items() if value is not None}
        (spec,) = requests_of([changed])
        assert spec.inputs is not None
        ids = changed["input_ids"][0].tolist()
        return RequestInfo(id=0, token_ids=ids, prompt_length=len(ids), inputs=keep_inputs(spec.inputs))

    check_inputs(qwen.oracle, request())
    with pytest.raises(HarnessError, match="the model does not take these inputs") as caught:
        check_inputs(qwen.oracle, request(mm_token_type_ids=None))  # HF would go on with positions of one axis
    assert caught.value.code is Code.BAD_INPUTS
    assert caught.value.expected == "mm_token_type_ids"
    fewer = request(
        input_ids=torch.tensor([[5 if token == 250 and at > 8 else token for at, token in enumerate(tokens)]])
    )
    with pytest.raises(HarnessError, match="Image features and image tokens do not match") as caught:
        check_inputs(qwen.oracle, fewer)
    assert caught.value.code is Code.BAD_INPUTS


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_runs_pass(family: str) -> None:
    assert [row[3] for row in sound_rows(family, "bfloat16")] == ["pass"] * len(SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_is_found_where_it_is_and_never_misnamed(family: str) -> None:
    with subject(family, "float32") as opened:
        for fault in FAULTS:
            if family in fault.families:
                *_, detected, _, is_there, word, said = fault_row(opened, family, "float32", fault)
                assert (detected, is_there) == ("yes", "yes"), fault.name
                assert word == ("named" if fault.says else "not named"), (fault.name, said)
