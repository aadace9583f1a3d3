"""A process of an engine's own: what it finds, which is seen by a module that only its variables lead to."""

import os

from harness.engines.process import EngineProcess

SAYS_ITS_PATH = """
import sys
from harness.engines.worker import serve

def main():
    serve(lambda message: {"path": sys.path})
"""


class Says(EngineProcess):
    module = "says_its_path"


def test_packages_of_its_own_come_before_ours(tmp_path, monkeypatch):
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    (tmp_path / "theirs" / "says_its_path.py").write_text(SAYS_ITS_PATH)
    monkeypatch.syspath_prepend(tmp_path / "ours")
    paths = [str(tmp_path / "theirs"), str(tmp_path / "more")]
    process = Says("worker", variables={"PYTHONPATH": os.pathsep.join(paths)})
    try:
        path_of_process = process.ask({}, doing="starting", timeout_s=600)["path"]
    finally:
        process.close()
    assert path_of_process[:3] == [*paths, str(tmp_path / "ours")]
