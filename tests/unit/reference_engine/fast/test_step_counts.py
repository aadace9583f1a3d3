"""What a recorded step of decode is made of, counted on the pretended device: nodes, launches, waits and bytes.

Exact numbers: a change that adds a node to each layer, a launch by the host, or a wait for the device is to be meant.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from reference_engine import EngineConfig, LLMEngine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "tests.pretended_gpu.plugin" not in sys.modules, reason="counts are those of tests/pretended_gpu"
    ),
]
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 96, 4, 2, 32
WEIGHTS_OF_A_LAYER = 2 * HEADS * HEAD_DIM * HIDDEN + 2 * KV_HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * FFN
MEMORY_ALONE = ("aten::empty", "aten::new_empty")
NORMS_OF_A_LAYER = 2 * HIDDEN + 2 * HEAD_DIM


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one step of decode."""

    nodes: Counter[str]
    """Operations of the recorded step by name; views are none."""
    launched: Counter[str]
    """What the host launches beside the replay."""
    waits: dict[str, int]
    """How often the host waits for the device."""
    copied_bytes: int
    """Moved from the host to the device."""
    read_bytes: int
    """Parameters that the recorded step reads, each once."""


class Launches(TorchDispatchMode):
    """Counts what is computed on the device, of which it does not see replays, and what is moved there."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.copied_bytes = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        is_view = any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)
        is_computed = not is_view and not func.name().startswith(MEMORY_ALONE)
        if is_computed and any(x.is_cuda for x in (*inputs, *outputs)):
            self.names[func.name()] += 1
            moved = [x for x in inputs if not x.is_cuda] if any(x.is_cuda for x in outputs) else []
            self.copied_bytes += sum(x.nbytes for x in moved if x.dim())
        return result


@contextmanager
def noted_replays() -> Iterator[list[Any]]:
    """Yield a list, which gets the graphs that are replayed."""
    replayed, replay = list[Any](), torch.cuda.CUDAGraph.replay

    def noted(self: Any) -> None:
        replayed.append(self)
        replay(self)

    torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]
    try:
        yield replayed
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def counted(folder: Path, num_layers: int, num_requests: int, **asked: Any) -> Counts:
    from tests.pretended_gpu.device import waits

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=num_layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    options = EngineConfig(
        dtype="bfloat16", device="cuda", attention_backend="triton", max_model_len=32, max_num_seqs=2, num_blocks=8,
        **asked,
    )  # fmt: skip
    launches = Launches()
    with noted_replays() as replayed, LLMEngine(folder, options) as engine:
        for request in range(num_requests):
            engine.add_request([5 + request, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        for _ in range(2):  # the prompts, and a step that is recorded
            engine.step()
        weights = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in engine.weights().values()}
        torch.ops.pretended_gpu.reset_syncs()
        replayed.clear()
        with launches:
            engine.step()
        waited = waits()
        (graph,) = replayed
        read = {x.untyped_storage().data_ptr() for _, args, kwargs, _ in graph.calls for x in tensors((args, kwargs))}
        return Counts(
            nodes=Counter(
                name for operation, *_ in graph.calls if not (name := operation.name()).startswith(MEMORY_ALONE)
            ),
            launched=launches.names,
            waits=waited,
            copied_bytes=launches.copied_bytes,
            read_bytes=sum(size for place, size in weights.items() if place in read),
        )


@pytest.fixture(scope="module", params=[1, 2], ids=["1 request", "2 requests"])
def two_sizes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    """Counts of one layer and of three."""
    folder = tmp_path_factory.mktemp("counts")
    one, three = (counted(folder / str(size), size, request.param) for size in (1, 3))
    return one, three


def of_a_layer(two_sizes: tuple[Counts, Counts], name: str) -> dict[str, int]:
    one, three = (getattr(counts, name) for counts in two_sizes)
    more = {operation: three[operation] - one[operation] for operation in three}
    assert all(number % 2 == 0 for number in more.values())
    return {operation: number // 2 for operation, number in more.items() if number}


def test_a_layer_is_ten_launches(two_sizes: tuple[Counts, Counts]) -> None:
    assert of_a_layer(two_sizes, "nodes") == {
        "aten::mm": 4, "reference_engine::add_norm": 2, "reference_engine::norm_rotate": 1,
        "reference_engine::store_kv": 1, "reference_engine::paged_decode": 1, "reference_engine::silu_mul": 1,
    }  # fmt: skip


def test_around_the_layers_are_eleven(two_sizes: tuple[Counts, Counts]) -> None:
    """The angles of rotary embeddings are six of them, and the copy of the logits one."""
    layer = of_a_layer(two_sizes, "nodes")
    rest = {name: number - layer.get(name, 0) for name, number in two_sizes[0].nodes.items()}
    assert {name: number for name, number in rest.items() if number} == {
        "aten::embedding": 1, "aten::_to_copy": 3, "aten::mul.Tensor": 1, "aten::cat": 1, "aten::cos": 1,
        "aten::sin": 1, "reference_engine::rms_norm": 1, "aten::mm": 1, "aten::copy_": 1,
    }  # fmt: skip


def test_the_host_launches_the_same_however_many_layers_there_are(two_sizes: tuple[Counts, Counts]) -> None:
    """One copy from the host, what fills the recorded batch, the choice of tokens and one copy to the host."""
    for counts in two_sizes:
        assert counts.launched == {
            "aten::_to_copy": 2, "aten::copy_": 2, "aten::fill_.Scalar": 1, "aten::max.dim": 1,
        }  # fmt: skip


def test_the_host_waits_once(two_sizes: tuple[Counts, Counts]) -> None:
    assert [counts.waits for counts in two_sizes] == [{"copy to the host": 1}] * 2


def test_a_step_in_flight_takes_two_more_launches_and_one_wait_for_the_step_before_it(tmp_path: Path) -> None:
    """The rows that the tokens are in are looked up; the wait is for an event behind which a step is launched."""
    counts = counted(tmp_path, 1, 2, async_scheduling=True)
    assert counts.launched == {
        "aten::_to_copy": 2, "aten::copy_": 3, "aten::fill_.Scalar": 1, "aten::max.dim": 1, "aten::index_select": 1,
    }  # fmt: skip
    assert counts.waits == {"event": 1}
    assert counts.copied_bytes == 2 * 6 * 8


def test_six_numbers_of_a_request_are_moved(two_sizes: tuple[Counts, Counts], request: pytest.FixtureRequest) -> None:
    """Its token, position, slot, length, row and the block of its table, in int64."""
    num_requests = request.node.callspec.params["two_sizes"]
    assert [counts.copied_bytes for counts in two_sizes] == [num_requests * 6 * 8] * 2


def test_each_weight_is_read(two_sizes: tuple[Counts, Counts]) -> None:
    """In bfloat16: all layers, the final norm, the head, and a table of embeddings of which a step reads some rows."""
    for counts, num_layers in zip(two_sizes, (1, 3), strict=True):
        layers = num_layers * (WEIGHTS_OF_A_LAYER + NORMS_OF_A_LAYER)
        assert counts.read_bytes == 2 * (layers + HIDDEN + 2 * VOCAB * HIDDEN)
