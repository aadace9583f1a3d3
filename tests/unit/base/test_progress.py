"""transformers says nothing while it is silenced, and afterwards what it said before."""

import io
import logging

import pytest
from transformers.utils import logging as hf_logging

from harness.base.progress import quiet_transformers


def test_it_is_silent_within_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    root, family = hf_logging.get_logger("transformers"), hf_logging.get_logger("transformers.models.llama")
    said, bars = io.StringIO(), hf_logging.is_progress_bar_enabled()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.INFO)
    monkeypatch.setattr(root, "handlers", [*root.handlers, handler])
    with quiet_transformers():
        family.warning("loading report")
        root.error("not found")
        family.critical("out of memory")
        assert not hf_logging.is_progress_bar_enabled()
    assert handler.level == logging.INFO
    assert hf_logging.is_progress_bar_enabled() == bars
    family.warning("afterwards")
    assert said.getvalue().splitlines() == ["out of memory", "afterwards"]
