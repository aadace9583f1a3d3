"""Metamorphic relations of the engine that `--engine` names."""

from typing import Any

import pytest
from hypothesis import settings

from harness.properties.engine.case import RELATIONS
from harness.properties.engine.suite import check_engine, not_checked, refusal

SHARE = 25
LEAST = 10
"""An example opens several engines: there are `SHARE` times fewer of them, but `LEAST`."""


@pytest.mark.parametrize("relation", RELATIONS)
def test_relation(engine: Any, property_settings: settings, relation: str, suite_record: Any) -> None:
    """Requests that are run otherwise give the same tokens, and the same intermediates within the noise."""
    suite_record.add_not_checked(not_checked(engine))
    why = refusal(engine, relation)
    if why:
        pytest.skip(why)
    few = settings(property_settings, max_examples=max(LEAST, property_settings.max_examples // SHARE))
    suite_record.add_rejections(f"engine: {RELATIONS[relation].what}", check_engine(engine, few, relation))
