"""Faults and sound variants of the reference engine behind HTTP, which shows tokens and log probabilities alone."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.extensions.faults.fault import ANY_ROW, EngineKind, Fault, Variant
from harness.formats.taps import LOGITS

_START_S = 60.0
_EVERY = 8
"""Of the faults that a server can show: each eighth is served."""
_NOTHING_SHOWS = {
    "product-cut-off-fp16": "its logits are nearer to the truth than those of the sound hf-eager/qwen3-tiny/float16: "
    "0.0027 and 0.0054 in relative L2 with seeds 2 and 0, against 0.0033 and 0.0083"
}
"""Of a fault that only its operation shows: the proof."""


def served_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Return faults of the reference engine behind HTTP. Of a server, the first wrong operation is what it returns."""
    shown = [fault for fault in faults if fault.tap is not None and fault.suite is None and _is_served(fault)]
    return [
        replace(
            fault, id=f"server/{fault.id}", engine=EngineKind.SERVER, tap=LOGITS, row=ANY_ROW,
            equivalent=_NOTHING_SHOWS.get(fault.id, ""),
        )
        for fault in shown[::_EVERY]
    ]  # fmt: skip


def served_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Return sound variants of the reference engine behind HTTP."""
    ours = [item for item in variants if (item.engine, item.engine_name) == (EngineKind.REFERENCE, "reference")]
    shown = [item for item in ours if _is_served(item)]
    return [replace(item, id=f"server/{item.id}", engine=EngineKind.SERVER) for item in shown[::_EVERY]]


def _is_served(entry: Fault | Variant) -> bool:
    setting = entry.setting
    changed = (setting.options, setting.config, setting.scaled, setting.weights_in, setting.numerics, setting.prompts)
    return setting.schedule == "batched" and not any(changed)


@contextmanager
def serving(folder: Path, dtype: str) -> Iterator[str]:
    """Serve a checkpoint by the reference engine, in a thread; yield the URL.

    Raises:
        ImportError: the packages of the extra `serve` are not installed.
    """
    import uvicorn

    from reference_engine import EngineConfig, LLMEngine
    from reference_engine.server.app import build_app
    from reference_engine.server.text import Text

    listener = socket.create_server(("127.0.0.1", 0))
    with LLMEngine(folder, EngineConfig(dtype=dtype, max_num_seqs=16)) as engine:
        app: Any = build_app(engine, Text(folder), model="tiny")
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + _START_S
        try:
            while not server.started and time.monotonic() < end:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_START_S)
            listener.close()
