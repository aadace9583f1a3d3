"""Property suites of the reference engine, for faults that no recording shows. Hypothesis is imported when one runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis import settings


def block_manager() -> None:
    """Hold the block manager to its invariants."""
    from harness.properties.blocks.suite import search_block_manager
    from harness.properties.reference.blocks import BlockManagerSubject

    search_block_manager(BlockManagerSubject, _settings()).raise_findings()


def sampling() -> None:
    """Hold the sampler to its properties."""
    from harness.properties.ops.tokens import check_sampling
    from harness.properties.reference.ops import Ops

    check_sampling(Ops, _settings())


def stopping() -> None:
    """Hold the ends of requests to their property."""
    from harness.properties.ops.tokens import check_stopping
    from harness.properties.reference.ops import Ops

    check_stopping(Ops, _settings())


def _settings() -> "settings":
    from harness.properties.core.search import PROFILES

    return PROFILES["dev"].settings()
