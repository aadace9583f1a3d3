"""The interface of an engine that is timed, and how one is opened by name."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from harness.engines import engine_names
from harness.errors import Code, HarnessError
from harness.selfcheck.bench.memory import ResidentMemory
from harness.selfcheck.bench.workload import BenchWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The settings that all engines of a run share."""

    folder: Path
    """The checkpoint."""
    hidden_size: int
    dtype: str
    device: str
    num_threads: int
    max_request_len: int
    """Tokens of the longest request."""
    max_total_len: int
    """Tokens of all requests of the largest workload: what must fit into the KV cache."""
    max_requests: int
    engine_options: Mapping[str, str]
    """Options of `engine`."""
    engine: str = "reference"
    """The engine that is compared with its peers."""

    def options_of(self, name: str) -> Mapping[str, str]:
        """Return the options of an engine; only the one that is compared with its peers has some."""
        return self.engine_options if name == self.engine else {}


@dataclass(slots=True)
class Generation:
    """The tokens of a workload, and their times."""

    start: float = field(default_factory=time.perf_counter)
    token_ids: list[list[int]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    """When each of the steps that brought tokens ended; one entry where an engine does not show its steps."""

    def end_step(self) -> None:
        """Note that the tokens of a step are on the host."""
        self.step_ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.step_ends[-1] - self.start

    @property
    def prefill_seconds(self) -> float:
        """Until the first tokens."""
        return self.step_ends[0] - self.start

    @property
    def decode_step_seconds(self) -> float:
        """Mean of the steps after the first."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)


class Peer(Protocol):
    """An engine that is timed."""

    name: str
    shows_steps: bool
    """Whether `Generation.step_ends` has every step, so that prefill and decode can be told apart."""

    def generate(self, workload: BenchWorkload) -> Generation:
        """Run the requests greedily, each to its length; an end-of-sequence token ends nothing."""

    def close(self) -> None:
        """Release the model and other memory."""


class PeerMissingError(Exception):
    """A peer is not installed; `package` is what pip would have to install, the peer's own extra if it is None."""

    def __init__(self, reason: str, *, package: str | None = None) -> None:
        super().__init__(reason)
        self.package = package


def _engine(name: str, setting: BenchConfig) -> Peer:
    from harness.selfcheck.bench.engine_peer import EnginePeer

    return EnginePeer(name, setting)


def _hf_generate(setting: BenchConfig) -> Peer:
    from harness.selfcheck.bench.hf_generate import HfGeneratePeer

    return HfGeneratePeer(setting)


def _hf_continuous(setting: BenchConfig) -> Peer:
    from harness.selfcheck.bench.hf_continuous import HfContinuousPeer

    return HfContinuousPeer(setting)


def _llamacpp(setting: BenchConfig) -> Peer:
    from harness.selfcheck.bench.llamacpp import LlamaCppPeer

    return LlamaCppPeer(setting)


OURS = "reference"
"""The engine that is timed if none is named."""
PEERS: dict[str, Callable[[BenchConfig], Peer]] = {
    OURS: partial(_engine, OURS),
    "hf-generate": _hf_generate,
    "hf-continuous": _hf_continuous,
    "llamacpp": _llamacpp,
}
"""Engines that are timed by default, by name; every installed engine can be named besides."""


def check_peer_names(names: Sequence[str]) -> None:
    """Refuse a name that neither a peer nor an installed engine has.

    Raises:
        HarnessError: BAD_OPTION.
    """
    known = list(dict.fromkeys([*PEERS, *engine_names()]))
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise HarnessError(
            Code.BAD_OPTION, "unknown peer", where="--peer", expected=", ".join(known), actual=", ".join(unknown)
        )


def peer_groups(names: Sequence[str], device: str, engine: str = OURS) -> list[list[str]]:
    """Return the engine and the named peers (all of `PEERS`, if none is named), in groups that are open together.

    On the CPU that is all of them, which are then timed in turn. On a GPU each is open by itself: two models of one
    size and their caches do not fit there beside each other.
    """
    peers = names or list(PEERS)
    in_order = [name for name in PEERS if name in peers] + [name for name in peers if name not in PEERS]
    chosen = list(dict.fromkeys([engine, *in_order]))
    return [chosen] if torch.device(device).type == "cpu" else [[name] for name in chosen]


@dataclass(slots=True)
class OpenPeers:
    """The peers of a group that are installed, and why the others are not there."""

    peers: list[Peer] = field(default_factory=list)
    memory: ResidentMemory = field(default_factory=ResidentMemory)
    absent: dict[str, str] = field(default_factory=dict)


@contextmanager
def open_peers(group: Sequence[str], setting: BenchConfig, *, required: Sequence[str]) -> Iterator[OpenPeers]:
    """Open the peers of a group for a block.

    Raises:
        HarnessError: BAD_OPTION: one that is required is not installed.
    """
    opened = OpenPeers()
    try:
        for name in group:
            try:
                with opened.memory.of(name):
                    opened.peers.append(PEERS.get(name, partial(_engine, name))(setting))
            except PeerMissingError as error:
                if name in required:
                    raise _not_installed(name, error) from error
                opened.absent[name] = str(error)
        yield opened
    finally:
        for peer in opened.peers:
            peer.close()
        opened.peers.clear()
        _release(setting.device)


def _not_installed(name: str, error: PeerMissingError) -> HarnessError:
    return HarnessError(
        Code.BAD_OPTION, f"{name} is not installed: {error}", where="--peer",
        hint=f"pip install '{error.package or f'inference-harness[{name}]'}'",
    )  # fmt: skip


def _release(device: str) -> None:
    """Give back what nothing refers to any more, but for circles that libraries have made."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
