"""The engines that are timed: their names, and how they are opened."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch

from harness.engines import engine_names, installed_engine_names
from harness.errors import Code, HarnessError
from harness.extensions.bench.memory import ResidentMemory
from harness.extensions.bench.peer import OURS, BenchConfig, Peer, PeerMissingError


def _engine(name: str, setting: BenchConfig) -> Peer:
    from harness.extensions.bench.engine_peer import EnginePeer

    return EnginePeer(name, setting)


def _of_module(module: str, name: str, setting: BenchConfig) -> Peer:
    """Open a peer by its class, whose module imports what the others need not have."""
    peer: Peer = getattr(import_module(f"harness.extensions.bench.{module}"), name)(setting)
    return peer


PEERS: dict[str, Callable[[BenchConfig], Peer]] = {
    OURS: partial(_engine, OURS),
    "hf-generate": partial(_of_module, "hf_generate", "HfGeneratePeer"),
    "hf-continuous": partial(_of_module, "hf_continuous", "HfContinuousPeer"),
    "llamacpp": partial(_of_module, "llamacpp", "LlamaCppPeer"),
}
"""Engines that are timed by default, by name; every installed engine can be named besides."""


def check_peer_names(names: Sequence[str]) -> None:
    """Refuse a name that neither a peer nor an installed engine has.

    Raises:
        HarnessError: BAD_OPTION.
    """
    unknown = sorted(set(names) - {*PEERS, *engine_names()})
    if unknown:
        missing = {*engine_names()} - {*installed_engine_names()}
        here = [name for name in dict.fromkeys([*PEERS, *engine_names()]) if name not in missing]
        raise HarnessError(
            Code.BAD_OPTION, "unknown peer", where="--peer", expected=", ".join(here), actual=", ".join(unknown)
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
    package = error.package or f"-e '.[{name}]' in the harness's checkout"
    what = f"{name} is not installed: {error}"
    return HarnessError(Code.BAD_OPTION, what, where="--peer", hint=f"pip install {package}")


def _release(device: str) -> None:
    """Give back what nothing refers to any more, but for circles that libraries have made."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
