"""Tensor parallelism without other processes: what is cut how, and what is told."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import LM_HEAD, TOKEN_EMBEDDING, weight_table
from reference_engine.errors import ConfigError
from reference_engine.families.build import build_decoder
from reference_engine.families.parts import Parts
from reference_engine.model_runner import ModelRunner
from reference_engine.parallel import ranks as parallel
from reference_engine.parallel.messages import decode_chunks, encode_chunks
from reference_engine.parallel.ranks import Ranks, RowParallel, ShardedTaps, VocabParallelEmbedding
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence

EMBEDDED = Path(__file__).parents[3] / "cases" / "checkpoints"
CPU = torch.device("cpu")


def ranks_of(size: int) -> list[Ranks]:
    return [Ranks(rank=rank, size=size, device=CPU) for rank in range(size)]


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"])
def test_what_does_not_divide_is_said_with_the_numbers(checkpoint: Any, name: str) -> None:
    config = ModelConfig.from_folder(checkpoint.folder)
    size = getattr(config, name) + 1
    with pytest.raises(ConfigError, match=rf"does not divide among the ranks.* found {size} ranks"):
        config.shard(size)


def test_experts_that_do_not_divide_are_said_with_the_numbers() -> None:
    config = ModelConfig.from_folder(EMBEDDED / "qwen3-moe-tiny")
    uneven = replace(config, mlps={0: replace(config.mlps[0], intermediate_size=31)})
    with pytest.raises(ConfigError, match=r"moe_intermediate_size does not divide.*divides 31, found 2 ranks"):
        uneven.shard(2)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny", "gemma3-tiny"])
def test_the_parts_of_all_ranks_are_the_whole(name: str) -> None:
    folder = EMBEDDED / name
    config = ModelConfig.from_folder(folder)
    whole = load_weights(folder, config, torch.float32, CPU)
    parts = [load_weights(folder, config, torch.float32, CPU, rank, 2) for rank in range(2)]
    num_q, num_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for name, tensor in whole.items():
        shards = [part[name] for part in parts]
        if "qkv_proj" in name:
            cut = [x.split([num_q // 2, num_kv // 2, num_kv // 2]) for x in shards]
            joined = torch.cat([torch.cat(same) for same in zip(*cut, strict=True)])
        elif "gate_up_proj" in name:
            joined = torch.cat([torch.cat(same) for same in zip(*(x.chunk(2) for x in shards), strict=True)])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            joined = torch.cat(shards, dim=1)
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            joined = torch.cat(shards)
        else:
            joined = shards[1]
        assert torch.equal(joined, tensor), name


@pytest.fixture
def _adding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank adds up is taken as it is."""
    monkeypatch.setattr(Ranks, "all_reduce", lambda self, x: x)
    monkeypatch.setattr(Ranks, "all_gather", lambda self, x, dim: torch.cat([x, x], dim=dim))


@pytest.mark.usefixtures("_adding")
def test_a_token_is_found_by_one_rank_and_zero_on_the_others() -> None:
    table, tokens = torch.randn(10, 3), torch.tensor([0, 4, 5, 9])
    rows = [
        VocabParallelEmbedding(part, ranks)(tokens) for part, ranks in zip(table.chunk(2), ranks_of(2), strict=True)
    ]
    assert torch.equal(rows[0] + rows[1], table[tokens])
    assert not rows[0][2:].any()
    assert not rows[1][:2].any()


@pytest.mark.usefixtures("_adding")
def test_shares_of_the_inputs_add_up_to_the_product() -> None:
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    parts = [
        RowParallel(lambda part, w=w: part @ w.T, ranks)(x_part)
        for w, x_part, ranks in zip(weight.chunk(2, dim=1), x.chunk(2, dim=1), ranks_of(2), strict=True)
    ]
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.T)


@pytest.mark.usefixtures("_adding")
@pytest.mark.parametrize(
    ("name", "is_sharded"),
    [("model.layers.0.q_rope", True), ("model.layers.0.self_attn.o_proj", False), ("model.layers.0.mlp.act", True),
     ("model.norm", False), ("lm_head", False), ("model.layers.1.k_cache", True), ("model.layers.1.output", False)],
)  # fmt: skip
def test_taps_are_joined_where_each_rank_has_a_part(name: str, is_sharded: bool) -> None:
    seen: dict[str, torch.Tensor] = {}

    class Watching:
        def tap(self, name: str, tensor: torch.Tensor) -> None:
            seen[name] = tensor

    ShardedTaps(ranks_of(2)[0], Watching()).tap(name, torch.ones(5, 3))  # type: ignore[arg-type]
    assert seen[name].shape == (5, 6 if is_sharded else 3)


def test_chunks_survive_being_told() -> None:
    def chunk(tokens: list[int], start: int, stop: int, table: list[int]) -> ScheduledChunk:
        request = Sequence(
            request_id=7, token_ids=tokens, num_prompt_tokens=2, params=SamplingParams(), block_table=array("q", table)
        )
        return ScheduledChunk(request, start, stop)

    told = [chunk([5, 6, 7, 8], 1, 3, [4, 2]), chunk([9], 0, 1, [3]), chunk([1, 2, 3], 2, 3, [])]
    told[1].sequence.rope_len = 17
    for before, after in zip(told, decode_chunks(list(encode_chunks(told))), strict=True):
        assert (after.start, after.stop, after.samples) == (before.start, before.stop, before.samples)
        assert after.sequence.block_table == before.sequence.block_table
        assert after.sequence.rope_len == before.sequence.rope_len
        span = slice(before.start, before.stop)
        assert after.sequence.token_ids[span] == before.sequence.token_ids[span]


def test_outside_of_torchrun_nobody_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="not started by torchrun"):
        Ranks.from_torchrun()


def open_runner(folder: Path, ranks: Ranks, **options: Any) -> ModelRunner:
    return ModelRunner(folder, EngineConfig(device="cuda", **options), ModelConfig.from_folder(folder), ranks)


def test_a_rank_opens_its_own_device(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(parallel, "open_device", lambda name: opened.append(name) or CPU)
    monkeypatch.setattr(Ranks, "least", lambda self, number: number)
    open_runner(checkpoint.folder, Ranks(rank=0, size=1, device=torch.device("cuda:1")))
    assert opened == ["cuda:1"]


def test_no_rank_has_more_blocks_than_another(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []
    monkeypatch.setattr(parallel, "open_device", lambda name: CPU)
    monkeypatch.setattr(Ranks, "least", lambda self, number: budgets.append(number) or number // 1024)
    block_bytes = 2 * 2 * 16 * 2 * 12 * 4
    runner = open_runner(checkpoint.folder, Ranks(rank=0, size=1, device=CPU))
    assert runner.backend.num_blocks == 1 + budgets[0] // 1024 // block_bytes


@pytest.mark.parametrize(
    ("rank", "num_local", "num_devices", "expected"),
    [(1, 2, 2, (1, 1)), (5, 4, 8, (1, 1)), (3, 4, 2, (1, 2)), (1, 2, 1, (0, 2)), (2, 3, 2, (0, 2))],
    ids=["alone on a GPU", "on a second machine", "two on each GPU", "two on the only GPU", "two on one, one on one"],
)
def test_ranks_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_local: int, num_devices: int, expected: tuple[int, int]
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(parallel.torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(parallel.torch.cuda, "set_device", lambda device: made.update(current=device))
    monkeypatch.setattr(parallel.dist, "TCPStore", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        parallel.dist, "init_process_group", lambda backend, **kwargs: made.update(kwargs, first=backend)
    )
    monkeypatch.setattr(parallel.dist, "new_group", lambda **kwargs: made.update(tensors=kwargs))
    ranks = Ranks.join("127.0.0.1:1", rank, 8, "cuda", num_local=num_local)
    index, num_on_device = expected
    assert (ranks.device, ranks.num_on_device) == (torch.device("cuda", index), num_on_device)
    assert made["current"] == ranks.device
    # Commands may be long in coming; an answer within a step may not, and NCCL takes one rank a GPU.
    assert (made["first"], made["timeout"]) == ("gloo", parallel.IDLE_LIMIT)
    assert made["tensors"] == {"backend": "nccl" if num_on_device == 1 else "gloo", "timeout": parallel.ANSWER_LIMIT}
    assert parallel.ANSWER_LIMIT < parallel.IDLE_LIMIT


def test_ranks_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda x, group=None: seen.append(x.dtype))
    total = Ranks(rank=0, size=2, device=CPU).all_reduce(torch.ones(2, dtype=torch.bfloat16))
    assert (seen, total.dtype) == ([torch.float32], torch.bfloat16)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_bias_of_a_sum_is_added_by_the_first_rank_alone(rank: int) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = ModelConfig.from_dict({**sizes, "model_type": "llama", "num_attention_heads": 2, "attention_bias": True})
    weights: dict[str, torch.Tensor] = {}
    for placement in weight_table(config).values():
        weights[placement.parameter] = torch.zeros(placement.shape)
    weights.setdefault(LM_HEAD, weights[TOKEN_EMBEDDING])
    built: Any = build_decoder(
        Parts(config=config, weights=weights, backend=None, parallel=ranks_of(2)[rank], rotary=None)  # type: ignore[arg-type]
    )
    assert (built.layers[0].attention.o_proj.linear.bias_O is None) == (rank == 1)
    assert built.layers[0].attention.qkv_proj.bias_O is not None
