"""Properties of the attention function that `--attention` names."""

from typing import Any

import pytest
from hypothesis import settings

from harness.properties.attention.cache import check_read_back, check_store
from harness.properties.attention.case import FOCUSES
from harness.properties.attention.subject import AttentionUnderTest, not_checked
from harness.properties.attention.suite import (
    check_batching,
    check_definition,
    check_merge,
    check_padded,
    check_placement,
)

SHARE = 4
"""Each kind of batch gets this many times fewer examples than all kinds together."""


@pytest.mark.parametrize("focus", FOCUSES)
def test_definition(attention: Any, property_settings: settings, focus: str, suite_record: Any, size_seed: int) -> None:
    """Every head of every row equals the definition in float64 within rounding."""
    suite_record.add_not_checked(not_checked(attention, size_seed))
    refusal = AttentionUnderTest(attention).served.refusal(focus)
    if refusal:
        pytest.skip(refusal)
    few = settings(property_settings, max_examples=property_settings.max_examples // SHARE)
    rejections = check_definition(attention, property_settings if focus == "any" else few, focus)
    suite_record.add_rejections(f"attention: {FOCUSES[focus]}", rejections)


def test_sizes_of_the_day(attention: Any, property_settings: settings, size_seed: int, suite_record: Any) -> None:
    """The same for sizes that change from day to day."""
    few = settings(property_settings, max_examples=property_settings.max_examples // SHARE)
    rejections = check_definition(attention, few, size_seed=size_seed)
    suite_record.add_rejections(f"attention: sizes of --size-seed {size_seed}", rejections)


def test_placement(attention: Any, property_settings: settings, suite_record: Any) -> None:
    """No bit depends on where the blocks lie, or on what unallocated slots hold."""
    suite_record.add_rejections("attention: the place of the blocks", check_placement(attention, property_settings))


@pytest.mark.parametrize(
    ("check", "offer"),
    [
        (check_batching, "is_batch_invariant"),
        (check_store, "store"),
        (check_read_back, "read_back"),
        (check_merge, "merge"),
        (check_padded, "attend_padded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_offers(attention: Any, property_settings: settings, check: Any, offer: str, suite_record: Any) -> None:
    """Optional methods of an adapter do what they should."""
    if not AttentionUnderTest(attention).declares(offer):
        pytest.skip(f"the adapter has no {offer}")
    suite_record.add_rejections(f"attention: {offer}", check(attention, property_settings))
