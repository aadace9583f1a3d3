"""Properties of the single operations that `--ops` names."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from harness.properties.core.findings import Rejections
from harness.properties.ops.adapter import OpsUnderTest, not_checked
from harness.properties.ops.loader import check_loader
from harness.properties.ops.norm import check_norms
from harness.properties.ops.rotary import check_rotary
from harness.properties.ops.tokens import check_sampling, check_stopping, check_tokenizer

CHECKS: dict[str, tuple[Callable[[Any, settings], Rejections], tuple[str, ...]]] = {
    "rotary": (check_rotary, ("rotary", "rotary_interleaved")),
    "norms": (check_norms, ("rms_norm", "layer_norm")),
    "sampling": (check_sampling, ("sample",)),
    "tokenizer": (check_tokenizer, ("encode",)),
    "loader": (check_loader, ("load",)),
    "stopping": (check_stopping, ("num_generated",)),
}
"""By name: the check, and the methods of which it needs one."""

SHARE = 4
"""An operation has several properties, each of which gets so many times fewer examples."""


@pytest.mark.parametrize("name", CHECKS)
def test_operation(ops: Any, property_settings: settings, name: str, suite_record: Any) -> None:
    """An operation has its properties."""
    suite_record.add_not_checked(not_checked(ops))
    check, methods = CHECKS[name]
    if not any(OpsUnderTest(ops).offers(method) for method in methods):
        pytest.skip(f"the adapter has no {' or '.join(methods)}")
    few = settings(property_settings, max_examples=property_settings.max_examples // SHARE)
    suite_record.add_rejections(f"ops: {name}", check(ops, few))
