"""The programs of docs/tensor-parallel.md, run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reference_engine import EngineConfig, LLMEngine

from ..documentation import Page

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS = Page("tensor-parallel").blocks("python")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "launcher"), list(zip(PROGRAMS, [(), TORCHRUN], strict=True)), ids=["script", "torchrun"]
)
def test_a_program_prints_what_one_rank_does(
    program: str, launcher: tuple[str, ...], checkpoints: Path, tmp_path: Path
) -> None:
    folder = checkpoints / "qwen3-tiny"
    expected = LLMEngine(folder, EngineConfig()).generate([[1, 2, 3]])[0].token_ids
    (tmp_path / "run.py").write_text(program.replace("path/to/checkpoint", str(folder)))
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "run.py")],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert str(expected) in done.stdout
