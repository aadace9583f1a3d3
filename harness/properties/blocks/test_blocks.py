"""Invariants 1 to 18 of the block manager that `--block-manager` names."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from harness.properties.blocks.suite import check_block_manager, not_checked


def test_block_manager(
    block_manager: Callable[..., Any], property_settings: settings, request: pytest.FixtureRequest
) -> None:
    """No sequence of calls breaks an invariant."""
    request.node.user_properties += [("not checked", line) for line in not_checked(block_manager)]
    check_block_manager(block_manager, property_settings)
