"""Puts the pretended device into torch: `torch.cuda` says that it is there, and Triton's interpreter reads it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .build import library
from .graphs import CUDAGraph, graph, host

NUM_BYTES = 139 << 30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=NUM_BYTES, multi_processor_count=132,
    L2_cache_size=60 << 20, shared_memory_per_block_optin=232448, warp_size=32,
)  # fmt: skip


class Event:
    """Stands for `torch.cuda.Event`: the host's clock, and the copies to the host that were begun before it."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at, self.num_late = 0.0, 0

    def record(self, stream: Any = None) -> None:
        self.at, self.num_late = time.perf_counter(), torch.ops.pretended_gpu.num_late()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.ops.pretended_gpu.wait("event", self.num_late)

    def wait(self, stream: Any = None) -> None: ...


class Stream:
    """Stands for `torch.cuda.Stream`: everything happens at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = torch.device("cuda", 0), 0, 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronize()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class History:
    """Stands for the allocator's history: all memory as one block, which was allocated when recording began."""

    is_on, begin_us = False, 0

    def record(self, enabled: Any = "all", *_: Any, **__: Any) -> None:
        self.is_on = enabled is not None
        self.begin_us = time.time_ns() // 1000

    def snapshot(self, device: Any = None) -> dict[str, Any]:
        block = {"address": 4096, "size": memory(), "requested_size": memory(), "frames": []}
        segment = {"device": 0, "address": 4096, "total_size": memory(), "stream": 0, "segment_type": "large"}
        segment["blocks"] = [{**block, "state": "active_allocated"}]
        event = {"action": "alloc", "addr": 4096, "size": memory(), "stream": 0, "time_us": self.begin_us, "frames": []}
        return {"segments": [segment], "device_traces": [[event]], "allocator_settings": {}}


DEFAULT, HISTORY = Stream(), History()
_current = [DEFAULT]


def synchronize(device: Any = None) -> None:
    if torch.ops.pretended_gpu.is_capturing():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (pretended: synchronize)")
    torch.ops.pretended_gpu.arrive()


def memory(peak: bool = False) -> int:
    """Return the bytes of the device that are taken, or were at most."""
    return int(torch.ops.pretended_gpu.memory()[int(peak)])


def waits() -> dict[str, int]:
    """Return how often the host waited for the device, by what it waited for."""
    pairs = (line.split(" ", 1) for line in torch.ops.pretended_gpu.syncs())
    return {name: int(number) for number, name in pairs}


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


@contextmanager
def on_device(_: Any) -> Iterator[None]:
    yield


CUDA: dict[str, Any] = {
    "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
    "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda _: None, "device": on_device,
    "device_of": on_device, "get_device_capability": lambda _=None: (9, 0),
    "get_device_name": lambda _=None: PROPERTIES.name,
    "get_device_properties": lambda _=None: PROPERTIES, "is_bf16_supported": lambda *_, **__: True,
    "Stream": Stream, "Event": Event, "stream": on_stream, "synchronize": synchronize,
    "current_stream": lambda _=None: _current[-1], "default_stream": lambda _=None: DEFAULT,
    "CUDAGraph": CUDAGraph, "graph": graph, "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: torch.ops.pretended_gpu.is_capturing(),
    "mem_get_info": lambda _=None: (NUM_BYTES - memory(), NUM_BYTES),
    "empty_cache": lambda: None, "ipc_collect": lambda: None,
    "memory_allocated": lambda _=None: memory(), "memory_reserved": lambda _=None: memory(),
    "max_memory_allocated": lambda _=None: memory(peak=True), "max_memory_reserved": lambda _=None: memory(peak=True),
    "reset_peak_memory_stats": lambda _=None: torch.ops.pretended_gpu.reset_peak(),
    "manual_seed": lambda _: None, "manual_seed_all": lambda _: None,
}  # fmt: skip
"""What `torch.cuda` has instead of its own."""


def install() -> None:
    """Put the device into this process, before anything asks torch for one.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    torch.ops.load_library(str(library()))
    torch.ops.pretended_gpu.install()
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    for name, value in {"_record_memory_history": HISTORY.record, "_snapshot": HISTORY.snapshot}.items():
        setattr(torch.cuda.memory, name, value)
    torch.cuda.memory._dump_snapshot = lambda *_, **__: None
    torch.cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda _: 0, rangePop=lambda: 0)
    torch._C._cuda_isHistoryEnabled = lambda: HISTORY.is_on
    _generate_on_the_host()
    _interpret_on_the_host()
    _trace_the_host_alone()


def _generate_on_the_host() -> None:
    generator_class = torch.Generator

    class Generator(generator_class):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator_class.__new__(cls, "cpu")

    torch.Generator = Generator  # type: ignore[misc]


def _interpret_on_the_host() -> None:
    """Give Triton's interpreter the host's view of each tensor, so that it neither copies nor asks for a device."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    call = GridExecutor.__call__

    def seen(x: Any) -> Any:
        return host(x) if isinstance(x, torch.Tensor) and x.is_cuda else x

    def on_the_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *map(seen, args), **{name: seen(value) for name, value in kwargs.items()})

    GridExecutor.__call__ = on_the_host


def _trace_the_host_alone() -> None:
    """Leave the activities of a GPU out of profiles: a CPU build of torch can only fail to trace them."""
    import torch.profiler

    original_init = torch.profiler.profile.__init__

    def init(self: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
        if activities is not None:
            activities = [activity for activity in activities if activity != torch.profiler.ProfilerActivity.CUDA]
        original_init(self, *args, activities=activities, **kwargs)

    torch.profiler.profile.__init__ = init
