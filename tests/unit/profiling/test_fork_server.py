"""Processes of two versions that are forked from one: what they share, and that none outlives the server."""

import os
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.gate.versions import ForkServer, Version, Worker

from ...loopback import until

PROGRAM = """
import json, os, sys
import mine
print(json.dumps({"sources": {"mine": [mine.__file__, json.loads(sys.argv[1])["name"]]}, "threads": os.getpid()}))
sys.stdout.flush()
for line in sys.stdin:
    print(json.dumps({"seconds": mine.SECONDS, "hash": hash("text"), "path": os.environ["PYTHONPATH"]}), flush=True)
"""


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Version]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr("harness.profiling.gate.versions._PROGRAM", program)
    texts = {"old": "SECONDS = 1", "new": "SECONDS = 2", "broken": "raise RuntimeError('no such kernel')"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    return {name: Version(label=name, root=tmp_path / name) for name in texts}


def test_each_process_imports_its_own_version_and_both_hash_alike(versions):
    with ForkServer(()) as server:
        with (
            Worker(server, versions["old"], {"name": "a"}) as old,
            Worker(server, versions["new"], {"name": "b"}) as new,
        ):
            for one in (old, new):
                one.wait_until_loaded()
            first, second = old.run(), new.run()
            assert (first["seconds"], second["seconds"]) == (1, 2)
            assert first["hash"] == second["hash"]
            assert first["path"].split(os.pathsep)[0] == str(versions["old"].root)
            assert old.sources == {"mine": [str(versions["old"].root / "mine.py"), "a"]}
        with Worker(server, versions["old"], {"name": "c"}) as again:
            again.wait_until_loaded()
            assert again.num_threads != old.num_threads, "a process of its own"


def test_a_version_that_does_not_run_is_named_with_its_error(versions):
    with (
        ForkServer(()) as server,
        pytest.raises(HarnessError, match="no such kernel") as caught,
        Worker(server, versions["broken"], {"name": "a"}) as broken,
    ):
        broken.wait_until_loaded()
    assert caught.value.code is Code.ENGINE_FAILED
    assert caught.value.where == "broken"


def test_a_process_that_hangs_ends_with_the_server(versions, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "\nimport time\ntime.sleep(3600)\n")
    with ForkServer(()) as server:
        old = Worker(server, versions["old"], {"name": "a"})
        old.wait_until_loaded()
        process = Path(f"/proc/{old.num_threads}")  # the program tells its number there
        assert process.exists()
    until(lambda: not process.exists(), what="the process has ended")
    old.__exit__(None)
