"""The peer's settings under each transformers that is supported."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from transformers import ContinuousBatchingConfig

from harness.extensions.bench import hf
from harness.extensions.bench.hf import PAGE_SIZE, HfContinuousPeer, _page_size_field
from harness.extensions.bench.peer import PeerMissingError
from harness.extensions.bench.peers import _not_installed


@dataclass
class ConfigOf517:
    block_size: int = 1


@dataclass
class ConfigOf523:
    page_size: int = 1
    block_size: int | None = None  # deprecated


def test_without_psutil_transformers_5_17_is_left_out_on_a_cpu(monkeypatch):
    monkeypatch.setattr(hf, "_page_size_field", lambda config: "block_size")
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(PeerMissingError, match="psutil") as caught:
        HfContinuousPeer(SimpleNamespace(device="cpu"))
    assert "pip install psutil" in str(_not_installed("hf-continuous", caught.value))


def test_a_page_has_the_size_under_the_name_that_this_transformers_gives_it():
    assert _page_size_field(ConfigOf517) == "block_size"
    assert _page_size_field(ConfigOf523) == "page_size"
    field = _page_size_field(ContinuousBatchingConfig)
    assert getattr(ContinuousBatchingConfig(**{field: PAGE_SIZE}), field) == PAGE_SIZE
