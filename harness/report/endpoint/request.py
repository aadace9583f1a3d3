"""A request to a server as a command that a person can run."""

import json
import shlex
from collections.abc import Mapping
from typing import Any


def curl(url: str, body: Mapping[str, Any]) -> str:
    """Return the command that posts a body. A server names models and tokens: nothing of it is read by the shell."""
    header = shlex.quote("content-type: application/json")
    return f"curl -s {shlex.quote(url)} -H {header} -d {shlex.quote(json.dumps(body))}"
