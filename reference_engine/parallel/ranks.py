"""Tensor parallelism: one model over several processes, each with its share of the heads, the ffn and the vocabulary.

Column-parallel products (q, k, v, gate, up, head) keep their share of the outputs; row-parallel ones (o, down) add up
what each rank has made of its share of the inputs (Shoeybi et al. 2019, section 3). Everything else is the same on
every rank. With one rank nothing of this is there.

Shapes: T tokens, D hidden, V vocab, O outputs.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import embedding

from reference_engine.cache_spec import cache_budget_bytes
from reference_engine.device import open_device
from reference_engine.errors import ConfigError, RankError
from reference_engine.layers import Linear
from reference_engine.observer import Observer, StepInfo
from reference_engine.parallel.messages import Command, encode_chunks
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.requests.sequence import Sequence as Request
from reference_engine.tensor_parallel import TensorParallel

__all__ = ["Ranks", "RowParallel", "ShardedTaps", "VocabParallelEmbedding", "VocabParallelHead"]

IDLE_LIMIT = timedelta(days=30)
"""For the next step: an engine may be idle. That a rank has ended is noticed at once, by its closed connections."""
ANSWER_LIMIT = timedelta(minutes=10)
"""For the others to hear of a step and to give their parts of a sum: the first steps compile kernels. NCCL does not see
that a rank has ended, so that this is how long the others wait for it."""
JOIN_LIMIT = timedelta(seconds=60)
_SHARDED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "attention", "gate_proj", "up_proj",
            "act", "k_cache", "v_cache")  # fmt: skip
"""Last parts of the names of taps of which each rank has its heads, or its part of the ffn: dimension 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(TensorParallel):
    """One process among those that share the model; all but the first do what it tells.

    Raises:
        RankError: in every method, when another rank has ended or does not answer.
    """

    rank: int
    size: int
    device: torch.device
    num_on_device: int = 1
    """Ranks that share this rank's device."""
    tensors: dist.ProcessGroup | None = None
    """Carries activations; None: what carries the commands, too."""

    @classmethod
    def join(cls, address: str, rank: int, size: int, device: str = "cpu", *, num_local: int | None = None) -> Ranks:
        """Meet the others at `address`, `127.0.0.1:29500`, where rank 0 listens.

        On CUDA each rank takes the GPU of its place among the `num_local` ranks of its machine (None: all of them).
        Ranks that outnumber the GPUs share them, and gloo carries their tensors through the host: NCCL takes one rank
        a GPU.
        """
        place, num_on_device = _place(torch.device(device), rank, num_local or size)
        with _rank_errors("joining the others"):
            host, _, port = address.rpartition(":")
            store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=JOIN_LIMIT)  # type: ignore[attr-defined]
            # What rank 0 tells is made and read on the host: with gloo, no rank waits for its device to hear it.
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE_LIMIT)
            backend = "nccl" if place.type == "cuda" and num_on_device == 1 else "gloo"
            tensors = dist.new_group(backend=backend, timeout=ANSWER_LIMIT)
        return cls(rank=rank, size=size, device=place, num_on_device=num_on_device, tensors=tensors)

    @classmethod
    def from_torchrun(cls, device: str = "cpu") -> Ranks:
        """Join as the environment that torchrun sets says.

        Raises:
            ConfigError: this process was not started by torchrun.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "not started by torchrun", where="environment", expected="RANK and WORLD_SIZE", actual="neither",
                hint="torchrun --nproc-per-node 2 SCRIPT",
            )  # fmt: skip
        address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"  # torchrun listens at its own
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls.join(address, rank, size, device, num_local=int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    def open_device(self, name: str) -> torch.device:
        """See `TensorParallel.open_device`: the one that was chosen on joining."""
        return open_device(str(self.device))

    def cache_budget_bytes(self, device: torch.device) -> int:
        """See `TensorParallel.cache_budget_bytes`; rank 0 hands out the blocks of all ranks, so none may have fewer."""
        return self.least(cache_budget_bytes(device, num_engines=self.num_on_device))

    def embedding(self, table_VD: torch.Tensor) -> VocabParallelEmbedding:
        """See `TensorParallel.embedding`."""
        return VocabParallelEmbedding(table_VD, self)

    def row_parallel(self, product: Linear) -> RowParallel:
        """See `TensorParallel.row_parallel`."""
        return RowParallel(product if self.rank == 0 else replace(product, bias_O=None), self)  # a bias is added once

    def head(self, product: Linear) -> VocabParallelHead:
        """See `TensorParallel.head`."""
        return VocabParallelHead(product, self)

    def watching(self, observer: Observer | None) -> ShardedTaps:
        """See `TensorParallel.watching`; ranks but the first have no observer, and only give their parts."""
        return ShardedTaps(self, observer)

    def tell_step(self, computed: Sequence[ScheduledChunk], is_observed: bool) -> None:
        """See `TensorParallel.tell_step`."""
        self.broadcast([Command.STEP, is_observed, *encode_chunks(computed)])

    def tell_copy(self, source: int, target: int) -> None:
        """See `TensorParallel.tell_copy`."""
        self.broadcast([Command.COPY_BLOCK, source, target])

    def tell_read_back(self, sequence: Request) -> None:
        """See `TensorParallel.tell_read_back`."""
        self.broadcast([Command.READ_BACK, *encode_chunks([ScheduledChunk(sequence, 0, sequence.num_computed_tokens)])])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank: in float32, so that the order of the ranks is not seen."""
        total = x.to(torch.float32)
        with _rank_errors("adding up"):
            dist.all_reduce(total, group=self.tensors)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all ranks' parts side by side along `dim`, on every rank."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with _rank_errors("joining parts"):
            dist.all_gather(parts, x.contiguous(), group=self.tensors)
        return torch.cat(parts, dim=dim)

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, on every rank, however long the slowest needs for its own."""
        smallest = torch.tensor([number])
        with _rank_errors("comparing numbers"):
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def broadcast(self, numbers: Sequence[int]) -> None:
        """Send integers from rank 0 to all others."""
        self._broadcast(torch.tensor([len(numbers)]), ANSWER_LIMIT)
        self._broadcast(torch.tensor(list(numbers), dtype=torch.int64), ANSWER_LIMIT)

    def receive(self) -> list[int]:
        """Wait for what rank 0 tells."""
        length = self._broadcast(torch.zeros(1, dtype=torch.int64), IDLE_LIMIT)
        numbers: list[int] = self._broadcast(torch.zeros(int(length), dtype=torch.int64), ANSWER_LIMIT).tolist()
        return numbers

    def leave(self) -> None:
        """Close the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, numbers: torch.Tensor, limit: timedelta) -> torch.Tensor:
        """Send or receive; with gloo, who sends waits until all have received."""
        with _rank_errors("passing on a step"):
            dist.broadcast(numbers, src=0, async_op=True).wait(limit)
        return numbers


def _place(device: torch.device, rank: int, num_local: int) -> tuple[torch.device, int]:
    """Return this rank's own device, and how many ranks share it."""
    if device.type != "cuda":
        return device, 1
    num_devices = max(1, torch.cuda.device_count())
    place = torch.device("cuda", rank % num_local % num_devices)
    torch.cuda.set_device(place)
    return place, -(-num_local // num_devices)


@contextmanager
def _rank_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the ranks lost each other while {doing}: {str(error).splitlines()[0]}", where="torch.distributed",
            hint="Look at what the other processes printed: one has ended or hangs.",
        ) from error  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A product over this rank's share of the inputs, added up over the ranks."""

    linear: Callable[[torch.Tensor], torch.Tensor]
    ranks: Ranks

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, O], the same on every rank."""
        return self.ranks.all_reduce(self.linear(x_TI))


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """The rows of this rank's tokens; those of other ranks' tokens are zero, and the sum has all."""

    weight_VD: torch.Tensor
    ranks: Ranks

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, D], the same on every rank."""
        local_T = token_ids_T - self.ranks.rank * len(self.weight_VD)
        is_ours_T = (local_T >= 0) & (local_T < len(self.weight_VD))
        rows_TD = embedding(local_T.where(is_ours_T, 0), self.weight_VD)
        return self.ranks.all_reduce(rows_TD.where(is_ours_T[:, None], 0))


@dataclass(frozen=True, slots=True)
class VocabParallelHead:
    """The logits of this rank's tokens, joined with those of all others."""

    linear: Callable[[torch.Tensor], torch.Tensor]
    ranks: Ranks

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, V], the same on every rank."""
        return self.ranks.all_gather(self.linear(x_TD), dim=1)


@dataclass(frozen=True, slots=True)
class ShardedTaps:
    """Joins the parts of each tap, so that rank 0's observer sees what it would with one rank."""

    ranks: Ranks
    observer: Observer | None
    """None on all ranks but the first, which only give their parts."""

    def begin_step(self, step: StepInfo) -> None:
        """See `Observer.begin_step`."""
        if self.observer is not None:
            self.observer.begin_step(step)

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        """Join the parts and show the whole."""
        whole = self.ranks.all_gather(tensor, dim=1) if name.rpartition(".")[2] in _SHARDED else tensor
        if self.observer is not None:
            self.observer.tap(name, whole)

    def end_step(self, sampled: Sequence[int]) -> None:
        """See `Observer.end_step`."""
        if self.observer is not None:
            self.observer.end_step(sampled)
