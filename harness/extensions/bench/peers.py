"""The engines that are timed: their names, how they are opened, and the memory that they take."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from harness.engines import engine_names, installed_engine_names, open_engine
from harness.engines.reference.errors import parse_reference_options, reference_errors
from harness.engines.stepping import Continuation
from harness.errors import Code, HarnessError
from harness.extensions.bench.peer import OURS, BenchConfig, BenchWorkload, Generation, Peer, PeerMissingError
from reference_engine import EngineConfig
from reference_engine.launch import choose_backend

STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096


class ResidentMemory:
    """Adds up by how much the process grew while it worked for each peer.

    Pages that a peer gives back and another one takes are counted for the first; what a peer keeps in a process of its
    own is not seen.
    """

    def __init__(self) -> None:
        self.grown_bytes: Counter[str] = Counter()
        """By peer; empty if the system does not tell (not Linux)."""

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Count what the process grows by in this block."""
        before = _resident_bytes()
        yield
        after = _resident_bytes()
        if before is not None and after is not None:
            self.grown_bytes[peer] += max(0, after - before)


def _resident_bytes() -> int | None:
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except OSError:
        return None


STEP_TOKENS = EngineConfig().max_num_batched_tokens
"""Tokens of a step, for every engine that lets us choose."""


class EnginePeer:
    """An engine with steps, or with `generate`."""

    def __init__(self, name: str, setting: BenchConfig) -> None:
        """Open the engine.

        Raises:
            HarnessError: as `open_engine`; ENGINE_LACKS_METHOD.
        """
        options, folder = setting.options_of(name), setting.folder_of(name)
        if name == OURS:
            options = choose_backend(options, folder=folder, device=setting.device).options
            options = {**_reference_sizes(setting, options), **options}
        engine = open_engine(name, folder, dtype=setting.dtype, device=setting.device, options=options)
        self.name = name
        self._continuation = Continuation(engine, max_num_tokens=STEP_TOKENS, max_num_seqs=setting.max_requests)
        self.shows_steps = self._continuation.shows_steps

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        generation = Generation(token_ids=[[] for _ in workload.prompts])
        for new_tokens in self._continuation.steps(workload.prompts, workload.output_lens):
            for prompt, token in new_tokens:
                generation.token_ids[prompt].append(token)
            generation.end_step()
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        self._continuation.close()


def _reference_sizes(setting: BenchConfig, options: Mapping[str, str]) -> dict[str, str]:
    """Return options by which all requests fit into the reference engine's cache at once."""
    with reference_errors("EngineConfig"):
        block_size = int(parse_reference_options(options).get("block_size", EngineConfig().block_size))
    # The last block of a request is filled in part only, and no request can have block 0.
    num_blocks = 1 + setting.max_requests + setting.max_total_len // max(1, block_size)
    return {"max_model_len": str(setting.max_request_len), "num_blocks": str(num_blocks)}


def _engine(name: str, setting: BenchConfig) -> Peer:

    return EnginePeer(name, setting)


def _of_module(module: str, name: str, setting: BenchConfig) -> Peer:
    """Open a peer by its class, whose module imports what the others need not have."""
    peer: Peer = getattr(import_module(f"harness.extensions.bench.{module}"), name)(setting)
    return peer


PEERS: dict[str, Callable[[BenchConfig], Peer]] = {
    OURS: partial(_engine, OURS),
    "hf-generate": partial(_of_module, "hf", "HfGeneratePeer"),
    "hf-continuous": partial(_of_module, "hf", "HfContinuousPeer"),
    "llamacpp": partial(_of_module, "llamacpp", "LlamaCppPeer"),
    "hf-static": partial(_of_module, "hf", "HfStaticPeer"),
    "gpt-fast": partial(_of_module, "gptfast", "GptFastPeer"),
}
"""Engines that can be timed, by name; every installed engine can be named besides."""
USUAL_PEERS = {
    "cpu": ("hf-generate", "hf-continuous", "llamacpp"),
    "cuda": ("hf-generate", "hf-continuous", "hf-static", "gpt-fast"),
}
"""Those that are timed by default."""


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
    """Return the engine and the named peers (`USUAL_PEERS`, if none is named), in groups that are open together.

    On the CPU that is all of them, which are then timed in turn. On a GPU each is open by itself: two models of one
    size and their caches do not fit there beside each other.
    """
    kind = torch.device(device).type
    peers = names or [OURS, *USUAL_PEERS.get(kind, USUAL_PEERS["cuda"])]
    in_order = [name for name in PEERS if name in peers] + [name for name in peers if name not in PEERS]
    chosen = list(dict.fromkeys([engine, *in_order]))
    return [chosen] if kind == "cpu" else [[name] for name in chosen]


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
