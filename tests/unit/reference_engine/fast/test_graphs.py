"""Recorded decode steps: which sizes there are, what is padded, and that nothing comes out differently."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.batch import Batch, build_batch
from reference_engine.fast.graphs import CudaCapture, DecodeGraphs, _joined, _padding, graph_sizes, table_widths
from reference_engine.model import Forward
from reference_engine.requests.sequence import ScheduledChunk, Sequence

from .kernels.launching import IGNORE_NUMPY, launch_on

CPU = torch.device("cpu")
Run = Callable[[Batch], torch.Tensor | None]
PROMPTS = [list(range(4, 21)), [5, 6, 7], list(range(4, 12))]


def again(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands in for a CUDA graph: the same call, on the same tensors, into the same result."""
    result = function().clone()

    def replay() -> None:
        result.copy_(function())

    return replay, result


def decode_batch(tables: list[list[int]], lengths: list[int]) -> Batch:
    chunks = []
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        request = Sequence(
            request_id=index, token_ids=list(range(1, length + 1)), num_prompt_tokens=1, params=SamplingParams(),
            block_table=array("q", table),
        )  # fmt: skip
        chunks.append(ScheduledChunk(request, length - 1, length))
    return build_batch(chunks, 4, CPU)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 250, 256])
def test_every_batch_fits_into_a_size_and_the_largest_is_there(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1


@pytest.fixture
def seen() -> list[Batch]:
    return []


@pytest.fixture
def run(seen: list[Batch]) -> Run:
    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.token_ids_T[:, None].float() * 10 + batch.positions_T[:, None]

    return partial(DecodeGraphs(max_num_seqs=6, max_blocks=3, device=CPU, capture=again).run, forward)


def test_rows_that_are_left_over_write_the_null_block_and_read_nothing(run: Run, seen: list[Batch]) -> None:
    run(decode_batch([[1, 2, 3], [4], [5, 6]], [12, 3, 7]))
    logits = run(decode_batch([[2], [3, 1], [4]], [4, 6, 1]))
    assert logits is not None
    assert logits[:, 0].tolist() == [43, 65, 10]
    batch = seen[-1]
    assert batch.slot_mapping_T.tolist() == [2 * 4 + 3, 1 * 4 + 1, 4 * 4, 0]
    assert batch.context_lens_R.tolist() == [4, 6, 1, 0]
    assert batch.block_tables_RB.tolist() == [[2, 0, 0], [3, 1, 0], [4, 0, 0], [0, 0, 0]]


def test_a_size_is_recorded_once(run: Run, seen: list[Batch]) -> None:
    for _ in range(3):
        run(decode_batch([[1]], [2]))
    assert len({id(batch) for batch in seen if len(batch.query_lens) == 1}) == 1
    run(decode_batch([[1], [2], [3], [4], [5]], [2] * 5))
    assert [len(batch.query_lens) for batch in seen][-1] == 6


def test_the_largest_size_is_recorded_first(run: Run, seen: list[Batch]) -> None:
    for num_requests in (1, 3, 1):
        run(decode_batch([[block + 1] for block in range(num_requests)], [2] * num_requests))
    assert list(dict.fromkeys(len(batch.query_lens) for batch in seen)) == [6, 1, 4]


def test_all_sizes_share_a_stream_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, Any]] = []

    def made(kind: str) -> Callable[..., Any]:
        return lambda *args: (
            used.append((kind, args)) or SimpleNamespace(wait_stream=lambda stream: None, replay=lambda: None)
        )

    @contextmanager
    def within(*args: Any, **kwargs: Any) -> Any:
        used.append(("capture", kwargs)) if kwargs else None
        yield

    for name in ("Stream", "graph_pool_handle", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, made(name))
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, within)
    capture = CudaCapture(CPU)
    for _ in range(3):
        capture(lambda: torch.zeros(1))
    kinds = [kind for kind, _ in used]
    assert (kinds.count("Stream"), kinds.count("graph_pool_handle"), kinds.count("CUDAGraph")) == (1, 1, 3)
    captures = [kwargs for kind, kwargs in used if kind == "capture"]
    assert [set(kwargs) for kwargs in captures] == [{"pool", "stream"}] * 3
    assert len({(id(kwargs["pool"]), id(kwargs["stream"])) for kwargs in captures}) == 1


@pytest.mark.parametrize(
    "batch",
    [decode_batch([[1, 2, 3, 4]], [13]), decode_batch([[n] for n in range(1, 8)], [1] * 7)],
    ids=["a table is too wide", "more requests than the largest size"],
)
def test_what_was_not_recorded_is_left_to_others(run: Run, batch: Batch) -> None:
    assert run(batch) is None


def test_a_prompt_is_left_to_others(run: Run) -> None:
    request = Sequence(
        request_id=0, token_ids=[1, 2, 3], num_prompt_tokens=3, params=SamplingParams(), block_table=array("q", [1])
    )
    assert run(build_batch([ScheduledChunk(request, 0, 3)], 4, CPU)) is None
    assert run(build_batch([ScheduledChunk(request, 0, 1)], 4, CPU)) is None, "nothing is sampled from it"


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return launch_on(request.param, monkeypatch)


@IGNORE_NUMPY
def test_the_engine_makes_the_same_tokens(checkpoint: Any, device: torch.device) -> None:
    """With the Triton backend: the real thing on a GPU, and the same calls again on the CPU."""
    config = EngineConfig(
        dtype="float32", device=str(device), attention_backend="triton", block_size=4, max_model_len=32, max_num_seqs=3,
        debug_checks=True, cuda_graphs=False,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    expected = LLMEngine(checkpoint.folder, config).generate(PROMPTS, params)
    engine = LLMEngine(checkpoint.folder, config)

    graphs = engine.runner.kernels.record(engine.backend, CudaCapture(device) if device.type == "cuda" else again)
    served: list[torch.Tensor | None] = []
    run = graphs.run

    def counted(forward: Forward, batch: Batch) -> torch.Tensor | None:
        served.append(run(forward, batch))
        return served[-1]

    graphs.run = counted  # type: ignore[method-assign]
    outputs = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert sum(logits is not None for logits in served) == 4


@IGNORE_NUMPY
def test_a_recorded_step_shows_the_taps_of_a_launched_one(checkpoint: Any, device: torch.device) -> None:
    """Bit for bit: the same kernels, on the same rows, beside the same padding."""
    shown: list[dict[str, torch.Tensor]] = []
    for watches in (False, True):
        config = EngineConfig(
            dtype="float32", device=str(device), attention_backend="triton", block_size=4, max_model_len=32,
            max_num_seqs=1, cuda_graphs=False, watch_graphs=watches,
        )  # fmt: skip
        with LLMEngine(checkpoint.folder, config, observer=(seen := Seen())) as engine:
            graphs = engine.runner.kernels.record(
                engine.backend, CudaCapture(device) if device.type == "cuda" else again
            )
            engine.generate(PROMPTS[1:2], SamplingParams(max_new_tokens=2, ignore_eos=True))
            assert bool(graphs._recorded) is watches
        shown.append(seen.taps)
    launched, recorded = shown
    assert list(launched) == list(recorded)
    assert [name for name in launched if not torch.equal(launched[name], recorded[name])] == []


def test_rows_behind_a_batch_are_padding_whatever_stood_there() -> None:
    recorded, replayed = _padding(4, 3, CPU), _padding(2, 2, CPU)
    for fixed, value in ((recorded, 7), (replayed, 5)):
        fixed.rows_4R.fill_(value)
        fixed.batch.block_tables_RB.fill_(value)
    recorded.fill(replayed.batch)
    by_row = ("token_ids_T", "positions_T", "slot_mapping_T", "context_lens_R")
    assert [getattr(recorded.batch, name).tolist() for name in by_row] == [[5, 5, 0, 0]] * 4
    assert recorded.batch.block_tables_RB.tolist() == [[5, 5, 0]] * 2 + [[0, 0, 0]] * 2


@pytest.mark.parametrize("num_rows", [1, 3])
def test_numbers_that_were_moved_in_one_piece_are_joined_without_a_copy(num_rows: int) -> None:
    batch = decode_batch([[block + 1] for block in range(num_rows)], [2 + row for row in range(num_rows)])
    rows = (batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.context_lens_R)
    apart = tuple(x.clone() for x in rows)
    assert torch.equal(_joined(rows), torch.stack(rows))
    assert _joined(rows).data_ptr() == rows[0].data_ptr()
    assert torch.equal(_joined(apart), torch.stack(apart))


@pytest.mark.parametrize(
    ("most", "widths"), [(1, [1]), (16, [16]), (17, [16, 17]), (128, [16, 64, 128]), (256, [16, 64, 256])]
)
def test_narrow_tables_have_widths_of_their_own(most: int, widths: list[int]) -> None:
    assert table_widths(most) == widths


def test_a_short_context_is_recorded_with_narrow_tables_and_gives_the_same(seen: list[Batch]) -> None:
    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.token_ids_T[:, None].float() * 10 + batch.block_tables_RB.sum(dim=1, keepdim=True)

    graphs = DecodeGraphs(max_num_seqs=2, max_blocks=40, device=CPU, capture=again)
    narrow, wide = decode_batch([[3, 4]], [7]), decode_batch([list(range(1, 31))], [120])
    for batch, width in ((narrow, 16), (wide, 40), (narrow, 16)):
        logits_RV = graphs.run(forward, batch)
        assert seen[-1].block_tables_RB.shape[1] == width
        assert logits_RV is not None
        assert logits_RV.tolist() == forward(batch).tolist()


class Seen:
    """An observer that keeps what it is shown."""

    def __init__(self) -> None:
        self.taps: dict[str, torch.Tensor] = {}

    def begin_step(self, step: Any) -> None: ...
    def end_step(self, sampled: Any) -> None: ...

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        self.taps[name] = tensor.clone()


def test_a_watched_step_shows_what_its_replay_made_and_no_padding() -> None:
    """A recording for each: a step that nobody watches copies nothing."""
    watched: list[bool] = []

    def forward(batch: Batch) -> torch.Tensor:
        watched.append(batch.observer is not None)
        x = batch.token_ids_T[:, None].float()
        batch.tap("layer.", "x", x)
        x += batch.positions_T[:, None]  # the engine may go on in the same memory
        batch.tap("layer.", "sum", x)
        return x * 10

    graphs = DecodeGraphs(max_num_seqs=6, max_blocks=3, device=CPU, capture=again)
    for batch, observer in (
        (decode_batch([[1, 2, 3], [4], [5, 6]], [12, 3, 7]), Seen()),
        (decode_batch([[1]], [2]), Seen()),
    ):
        logits_RV = graphs.run(forward, replace(batch, observer=observer))
        assert logits_RV is not None
        assert list(observer.taps) == ["layer.x", "layer.sum"]
        assert observer.taps["layer.x"][:, 0].tolist() == batch.token_ids_T.tolist()
        assert torch.equal(observer.taps["layer.sum"] * 10, logits_RV)
    assert all(watched)
    graphs.run(forward, decode_batch([[1]], [2]))
    assert not all(watched)


def test_all_shapes_leave_their_logits_in_one_place() -> None:
    places: list[int] = []

    def capture(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        def replay() -> None:
            function()

        result = function()
        places.append(result.data_ptr())
        return replay, result

    graphs = DecodeGraphs(max_num_seqs=4, max_blocks=20, device=CPU, capture=capture)
    for lengths in ([3], [3, 7], [70], [1, 2, 3]):
        batch = decode_batch([list(range(1, 19)) if length > 60 else [1, 2] for length in lengths], lengths)
        logits_RV = graphs.run(lambda padded: padded.positions_T[:, None].float().expand(-1, 5), batch)
        assert logits_RV is not None
        assert logits_RV.tolist() == [[length - 1.0] * 5 for length in lengths]
    assert len(places) > 3
    assert len(set(places)) == 1
