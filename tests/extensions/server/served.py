"""The reference engine behind HTTP, in this process, for tests that skip where fastapi is not installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.extensions.server.address import Address

from ...loopback import serving

FOLDER = Path(__file__).parents[3] / "cases" / "checkpoints" / "qwen3-tiny"


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    url: str
    app: Any
    """The application, with what a test puts before it."""
    text: Any
    """The server's tokenizer and chat template, which tests break."""

    def address(self, **limits: Any) -> Address:
        return Address(url=self.url, **{"timeout_s": 600} | limits)


@contextmanager
def serve(
    folder: Path = FOLDER,
    *,
    model: str = "tiny",
    wrap: Callable[[Any], Any] = lambda app: app,
    adapters: Any = None,
    drafter: Any = None,
    dtype: str = "float32",
    **options: Any,
) -> Iterator[Served]:
    """Serve a checkpoint; `options` are fields of `EngineConfig`, and `drafter` guesses tokens for it to verify."""
    from reference_engine import EngineConfig, LLMEngine
    from reference_engine.server.app import build_app
    from reference_engine.server.text import Text

    text = Text(folder)
    with LLMEngine(folder, EngineConfig(dtype=dtype, **options), adapters=adapters) as engine:
        if drafter is not None:
            engine.drafter = drafter
        app = wrap(build_app(engine, text, model=model))
        with serving(app) as url:
            yield Served(url, app, text)
