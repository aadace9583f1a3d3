"""Real servers on the loopback address: in a thread of the test's own process, or in processes of their own."""

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application, with options of uvicorn, and yield its URL."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, what="the server has started")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(600)
        listener.close()


def free_port() -> int:
    """Return a port that nobody listens on yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """Whether a server answers with status 200."""
    try:
        return bool(urllib.request.urlopen(url, timeout=2).status == 200)
    except OSError:
        return False


def until(holds: Any, *, what: str, seconds: float = 600.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.002)
