"""The files that a process has read: modules from outside of wheels, and data; a changed one has another digest."""

import json
import os
import subprocess
import sys
import time

from harness.base.files_read import add_files, files_read

PROGRAM = """
import json, os, sys
from pathlib import Path
from harness.base.files_read import files_read, watch_files
watch_files()
import engine, wheel, patched, numpy, email
open("data.bin", "rb").close()
os.close(os.open(".", os.O_RDONLY))  # a folder
open("written.txt", "w").close()
open("written.txt").close()
engine.late()
Path("left_out").mkdir()
Path("left_out/golden.json").write_text("{}")
print(json.dumps(files_read()))
"""


def read_in_a_process(folder):
    packages = folder / "site-packages"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(packages)]), "PYTHONDONTWRITEBYTECODE": "1"}
    env["HARNESS_FILES_READ_BUT"] = str(folder / "left_out")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, env=env, capture_output=True, check=True)
    return {str(path).removeprefix(f"{folder}/"): digest for path, digest in json.loads(done.stdout).items()}


def test_modules_and_data_from_outside_of_wheels(tmp_path):
    folder = tmp_path.resolve()
    (folder / "engine.py").write_text(
        "from pathlib import Path\ndef late():\n    import other\n    Path(other.__file__).write_text('')\n"
    )
    (folder / "other.py").write_text("GOOD = 1")
    (folder / "data.bin").write_bytes(b"weights")
    record = folder / "site-packages" / "wheel-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("wheel.py,,\npatched.py,,\n")
    for name in ("wheel", "patched"):
        (folder / "site-packages" / f"{name}.py").write_text("")
    later = time.time() + 60
    os.utime(folder / "site-packages" / "patched.py", (later, later))
    time.sleep(0.1)  # a file written just before the process is taken for one written in it
    first, second = read_in_a_process(folder), None
    ours = {name for name in first if not name.startswith("/")}
    assert ours == {"engine.py", "other.py", "data.bin", "site-packages/patched.py"}
    assert not any("numpy" in name or "/email/" in name for name in first)
    for name in ("written.txt", "left_out/golden.json"):
        (folder / name).unlink()
    (folder / "left_out").rmdir()
    (folder / "other.py").write_text("GOOD = 1")
    time.sleep(0.1)
    second = read_in_a_process(folder)
    assert {name for name in ours if first[name] != second[name]} == {"other.py"}, "it changes while it is in use"


def test_a_process_that_ended_without_a_word_is_as_if_all_had_changed():
    told = []
    for _ in range(2):
        add_files(None, "engine")
        told.append(files_read()["engine"])
    assert told[0] != told[1]
    assert "engine" not in files_read(), "it is told once"
