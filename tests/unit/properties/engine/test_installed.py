"""Any installed engine under the engine suite, through `run` alone: the same rows and choices, however it is run."""

from contextlib import contextmanager

import pytest
from hypothesis import settings

from harness.engines import Capabilities
from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.engine import installed
from harness.properties.engine.installed import installed_engine
from harness.properties.engine.suite import check_engine, refusal
from harness.pytest_plugin import properties

FEW = settings(PROFILES["dev"].settings(), max_examples=10)
PROMPT = list(range(7, 18))


@contextmanager
def opened(monkeypatch, engine):
    """Have the name `mine` open an engine."""
    monkeypatch.setattr(installed, "open_engine", lambda *_args, **_options: engine)
    installed_engine.cache_clear()
    yield installed_engine("mine")
    installed_engine.cache_clear()


def test_two_engines_choose_alike_along_the_same_drawn_tokens():
    engines = [installed_engine(name) for name in ("reference", "hf")]
    ours, theirs = (engine().generate([PROMPT, [3, 4]], [4, 2]) for engine in engines)
    assert ours == theirs
    assert [len(tokens) for tokens in ours] == [4, 2]
    assert all(0 <= token < 256 for tokens in ours for token in tokens)


def test_taps_have_every_row_of_the_last_call_by_its_place():
    engine = installed_engine("reference")()
    engine.generate([[9, 9]], [1])
    engine.generate([PROMPT, [3, 4]], [2, 1])
    rows = engine.taps()["model.layers.0.output"]
    assert set(rows) == {(0, position) for position in range(12)} | {(1, 0), (1, 1)}
    assert set(engine.taps()["lm_head"]) == {(0, 10), (0, 11), (1, 1)}


def test_a_prefix_that_was_served_before_is_found_and_counted():
    engine = installed_engine("reference")(block_size=4, prefix_caching=True)
    engine.generate([PROMPT], [1])
    assert engine.num_cached_tokens() == 0
    engine.generate([PROMPT], [2])
    assert engine.num_cached_tokens() == 8, "two whole blocks of four"


def test_a_preemption_is_counted_and_changes_no_token():
    crowd = [PROMPT, [3] * 11], [6, 6]
    cramped, roomy = (installed_engine("reference")(block_size=4, num_blocks=count) for count in (6, 20))
    assert cramped.generate(*crowd) == roomy.generate(*crowd)
    assert (cramped.num_preemptions(), roomy.num_preemptions()) == (1, 0)


class Shifting:
    """The reference engine, whose norm is off where requests share a step."""

    name = "mine"

    def __init__(self, inner):
        self.inner, self.capabilities = inner, inner.capabilities

    def run(self, workload, writer):
        self.inner.run(workload, Shifted(writer))


class Shifted:
    def __init__(self, writer):
        self.writer, self.is_shared = writer, False

    def begin_step(self, **step):
        self.is_shared = len(set(step["request"])) > 1
        self.writer.begin_step(**step)

    def tap(self, name, tensor):
        self.writer.tap(name, tensor * 1.01 if self.is_shared and name == "model.norm" else tensor)

    def end_step(self, sampled=()):
        self.writer.end_step(sampled)


@pytest.mark.slow
def test_what_depends_on_the_batch_is_found_and_the_program_names_the_engine(monkeypatch):
    inner = installed_engine("reference").engine
    with opened(monkeypatch, Shifting(inner)) as adapter, pytest.raises(PropertyError) as caught:
        check_engine(NamedAdapter(adapter, ("from x import y",), "installed_engine('mine')"), FEW, "batch")
    assert "model.norm" in str(caught.value)
    assert "engine = installed_engine('mine')()" in str(caught.value)


def test_the_options_of_pytest_name_engine_and_checkpoint():
    adapter = properties._installed("reference", "llama-tiny")
    assert adapter.expression == "installed_engine('reference', 'llama-tiny')"
    assert adapter.imports == ("from harness.properties.engine.installed import installed_engine",)
    assert adapter.target.folder.name == "llama-tiny"
    assert properties._installed("reference", None).expression == "installed_engine('reference')"


def test_an_engine_without_control_is_told_what_cannot_be_checked():
    why = {
        relation: refusal(installed_engine("hf"), relation) for relation in ("batch", "chunks", "prefix hit", "poison")
    }
    assert why == {
        "batch": None,
        "chunks": "Capabilities.control does not name max_num_batched_tokens",
        "prefix hit": "Capabilities.control does not name enable_prefix_caching",
        "poison": "no workload of the harness decides poison",
    }


def test_an_engine_that_runs_requests_one_by_one_has_nothing_to_compare(monkeypatch):
    class Alone:
        name, capabilities = "mine", Capabilities(schedules=("plain", "chunked"))

    with pytest.raises(HarnessError, match="cannot run requests together") as caught, opened(monkeypatch, Alone()):
        pass
    assert caught.value.code is Code.ENGINE_LACKS_METHOD
    assert caught.value.actual == "plain, chunked"
