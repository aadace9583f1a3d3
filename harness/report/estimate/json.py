"""What a model needs, as JSON-able data with a version."""

from dataclasses import asdict
from typing import Any

from harness.results.estimate import Estimate

SCHEMA_VERSION = 1


def estimate_json(result: Estimate) -> dict[str, Any]:
    """Return the whole estimate: bytes, FLOPs and seconds."""
    gpus = [asdict(gpu) | {"fits": gpu.fits} for gpu in result.gpus]
    return {"schema_version": SCHEMA_VERSION, "kind": "estimate", **asdict(result), "gpus": gpus}
