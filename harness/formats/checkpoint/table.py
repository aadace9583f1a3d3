"""A JSON object in a file of a checkpoint, which may be damaged or hostile."""

import reprlib
from pathlib import Path
from typing import Any

from harness.base.files import parse_json, read_bytes
from harness.formats.checkpoint.refusals import bad_config


def read_table(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, and the bytes that it was read from.

    Raises:
        HarnessError: BAD_CONFIG.
    """
    try:
        content = read_bytes(path)
        table = parse_json(content)
    except OSError as error:
        bad_config(f"the file cannot be read: {error.strerror}", path, None)
    except ValueError as error:  # JSON and UTF-8 alike
        bad_config("the file is not JSON", path, reprlib.repr(str(error)))
    if not isinstance(table, dict):
        bad_config("the file is not a JSON object", path, reprlib.repr(table))
    return table, content
