"""Rows of a tap, where a request was computed more than once."""

import torch

from harness.formats.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo, RunInfo
from harness.judge.compare.align import Locator, Rows
from harness.judge.explain.failure import gathered


def recorded(path):
    """A request of two tokens that is computed twice, by steps 0 and 1."""
    writer = RecordingWriter(
        path,
        RunInfo(producer=Producer(name="test", version="1"), model=ModelInfo(id="m"), dtype="float32", device="cpu"),
        [RequestInfo(id=0, token_ids=[5, 6], prompt_length=2)],
    )
    with writer:
        for value in (1.0, 2.0):
            writer.begin_step(phase="prefill", request=[0, 0], position=[0, 1])
            writer.tap("x", torch.tensor([[value], [10 * value]]))
            writer.end_step()
    return path


def test_a_row_that_was_computed_twice_is_taken_from_its_own_step(tmp_path):
    with Recording.open(recorded(tmp_path / "r")) as recording:
        position, request = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0])
        rows = Rows(request=request, position=position, step=torch.tensor([0, 1, 1]))
        assert gathered(Locator(recording), "x", rows).tolist() == [[1.0], [20.0], [2.0]]


def test_a_tap_that_was_not_recorded_has_no_rows(tmp_path):
    with Recording.open(recorded(tmp_path / "r")) as recording:
        rows = Rows(request=torch.tensor([0]), position=torch.tensor([0]), step=torch.tensor([0]))
        assert gathered(Locator(recording), "y", rows) is None
