"""The peer's settings under each transformers that is supported."""

from dataclasses import dataclass

from transformers import ContinuousBatchingConfig

from harness.bench.hf_continuous import PAGE_SIZE, _page_size_field


@dataclass
class ConfigOf517:
    block_size: int = 1


@dataclass
class ConfigOf523:
    page_size: int = 1
    block_size: int | None = None  # deprecated


def test_a_page_has_the_size_under_the_name_that_this_transformers_gives_it():
    assert _page_size_field(ConfigOf517) == "block_size"
    assert _page_size_field(ConfigOf523) == "page_size"
    own = _page_size_field(ContinuousBatchingConfig)
    assert getattr(ContinuousBatchingConfig(**{own: PAGE_SIZE}), own) == PAGE_SIZE
