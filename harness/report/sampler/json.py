"""A check of a server's sampler for programs."""

from typing import Any

from harness.report.check.json import plain
from harness.results.sampler import SamplerResult

SCHEMA_VERSION = 1


def sampler_json(result: SamplerResult) -> dict[str, Any]:
    """Return a check of a sampler as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    for own, setting in zip(document["settings"], result.settings, strict=True):
        own["verdict"] = setting.outcome.value
    for own, definition in zip(document["definitions"], result.definitions, strict=True):
        own["fits"] = definition.fits
    head = {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.outcome.value,
        "num_draws": result.num_draws,
        "not_judged": result.not_judged,
    }
    return {**head, **document}
