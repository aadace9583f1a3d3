"""Errors of HF's own code, told from those that the harness raises while it watches."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import Code, HarnessError

_PASSED_THROUGH = ("harness/oracle/watch.py", "harness/oracle/precision.py", "harness/oracle/flow.py", "/torch/")
"""Files whose frames stand between HF's code and the operation that raises."""


@contextmanager
def hf_failures(folder: Path) -> Iterator[None]:
    """Turn what HF's code raises in this block into an error that names it; other exceptions stay what they are.

    Raises:
        HarnessError: HF_FAILED.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        if not _is_hfs(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise HarnessError(
            Code.HF_FAILED,
            f"HF's own forward raised {type(error).__name__}: {message}",
            where=folder,
            expected="a model that transformers can run",
            hint="run the model with transformers alone; try another --dtype, or another release of transformers",
        ) from error


def _is_hfs(error: Exception) -> bool:
    files = [Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if not any(part in file for part in _PASSED_THROUGH)]
    return bool(own) and "/transformers" in own[-1]
