"""What an engine has to do to be timed, and how one is opened by name."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.bench.workload import Workload
from harness.errors import Code, HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all engines of a run have in common."""

    folder: Path
    """The checkpoint."""
    dtype: str
    device: str
    num_threads: int
    max_request_len: int
    """Tokens of the longest request."""
    max_total_len: int
    """Tokens of all requests of the largest workload: what must fit into the KV cache."""
    max_requests: int
    engine_options: Mapping[str, str]
    """Options of the reference engine."""


@dataclass(slots=True)
class Generation:
    """What came of a workload, and when."""

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
        """Mean of the steps behind the first."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)


class Peer(Protocol):
    """An engine that is timed."""

    name: str
    shows_steps: bool
    """Whether `Generation.step_ends` has every step, so that prefill and decode can be told apart."""

    def generate(self, workload: Workload) -> Generation:
        """Run the requests greedily, each to its length; an end-of-sequence token ends nothing."""


class PeerMissingError(Exception):
    """The package of a peer is not installed."""


def _reference(setting: Setting) -> Peer:
    from harness.bench.reference import ReferencePeer

    return ReferencePeer(setting)


def _hf_generate(setting: Setting) -> Peer:
    from harness.bench.hf_generate import HfGeneratePeer

    return HfGeneratePeer(setting)


def _hf_continuous(setting: Setting) -> Peer:
    from harness.bench.hf_continuous import HfContinuousPeer

    return HfContinuousPeer(setting)


def _llamacpp(setting: Setting) -> Peer:
    from harness.bench.llamacpp import LlamaCppPeer

    return LlamaCppPeer(setting)


OURS = "reference"
PEERS: dict[str, Callable[[Setting], Peer]] = {
    OURS: _reference,
    "hf-generate": _hf_generate,
    "hf-continuous": _hf_continuous,
    "llamacpp": _llamacpp,
}


def check_peer_names(names: Sequence[str]) -> None:
    """Refuse a name that no peer has.

    Raises:
        HarnessError: BAD_OPTION.
    """
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise HarnessError(
            Code.BAD_OPTION, "unknown peer", where="--peer", expected=", ".join(PEERS), actual=", ".join(unknown)
        )


def open_peers(names: Sequence[str], setting: Setting) -> tuple[list[Peer], dict[str, str]]:
    """Return ours and the named peers (all, if none is named), and of those that are absent why.

    Raises:
        HarnessError: BAD_OPTION: a peer that was named is not installed.
    """
    peers, absent = [], {}
    for name, open_peer in PEERS.items():
        if name != OURS and names and name not in names:
            continue
        try:
            peers.append(open_peer(setting))
        except PeerMissingError as error:
            if name in names:
                raise HarnessError(
                    Code.BAD_OPTION, f"{name} is not installed: {error}", where="--peer",
                    hint=f"pip install 'inference-harness[{name}]'",
                ) from error  # fmt: skip
            absent[name] = str(error)
    return peers, absent
