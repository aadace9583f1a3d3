"""The way to a Ray cluster: what stands in it is said at once, where Ray itself would wait for minutes."""

import socket
from typing import Any

from harness.errors import Code, HarnessError

_CONNECT_S = 5.0


def connected(address: str) -> Any:
    """Return the module `ray`, connected to the cluster.

    Raises:
        HarnessError: NO_CLUSTER; NODES_DIFFER: it runs another Ray or Python.
    """
    try:
        import ray
    except ImportError as error:
        hint = "pip install 'inference-harness[ray]', or leave --ray out"
        raise HarnessError(Code.NO_CLUSTER, "Ray is not installed", where="--ray", hint=hint) from error
    _refuse_unreachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise _no_cluster(address, error) from error
        what = "the cluster runs another Ray or another Python than this machine"
        actual = " ".join(str(error).split())
        raise HarnessError(Code.NODES_DIFFER, what, where=address, actual=actual) from error
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise _no_cluster(address, error) from error
    return ray


def _refuse_unreachable(address: str) -> None:
    """Ray itself waits for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        what, expected = "this is no address of a cluster", "HOST:PORT of its head, or auto"
        raise HarnessError(Code.NO_CLUSTER, what, where="--ray", expected=expected, actual=address)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> HarnessError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    hint = "ray status --address HOST:PORT says whether it runs; ray start --head starts one"
    return HarnessError(Code.NO_CLUSTER, f"the cluster cannot be reached: {reason}", where=address, hint=hint)
