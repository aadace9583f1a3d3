"""`harness server check` against `transformers serve`, in a process of its own on the loopback address."""

import importlib.util
import subprocess
import sys

import pytest

from ....loopback import answers, free_port, until

NEEDED = ("fastapi", "uvicorn", "openai", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"pip install 'transformers[serving]': without {MISSING}"),
]


@pytest.fixture
def url(stories):
    """The address of the server with the small story model."""
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(stories), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--device", "cpu", "--dtype", "float32"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), what="the server answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(600)


@pytest.mark.parametrize(("prompt", "status", "codes"), [("Once upon a time", 0, set()), ("The cat sat", 1, {"H048"})])
def test_text_alone_is_judged_and_a_dropped_space_is_read_as_another_token(
    harness, url, stories, prompt, status, codes
):
    """The limit that stands in docs/endpoints.md: the answer `down` is ` down`, without its space."""
    asked = ("--model", stories, "--served-model", stories, "--dtype", "float32", "--prompt", prompt)
    ran = harness("server", "check", "--endpoint", url, *asked, "--max-new-tokens", "8", "--format", "json")
    assert ran.status == status, ran.out
    assert {finding["code"] for finding in ran.json["findings"]} == codes
    assert any("tokens alone were judged" in note for note in ran.json["notes"])
