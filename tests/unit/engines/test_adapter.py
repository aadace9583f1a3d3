"""Finding engines, and what they declare."""

import subprocess
import sys

import pytest

from harness.engines import Capabilities, engine_names, open_engine
from harness.engines.adapter import parse_flag, parse_value
from harness.errors import Code, HarnessError

from ..decoder_graph import decoder_graph


def test_ours_are_installed():
    assert {"hf", "reference"} <= set(engine_names())


def test_an_unknown_engine_is_told_which_there_are(tmp_path):
    with pytest.raises(HarnessError) as caught:
        open_engine("refrence", tmp_path, dtype="float32", device="cpu")
    assert caught.value.code is Code.UNKNOWN_ENGINE
    assert {"hf", "reference"} <= set(engine_names())
    assert ", ".join(engine_names()) in str(caught.value)
    assert "actual:   refrence" in str(caught.value)


def test_what_is_wanted_is_the_graph_without_what_is_lacking():
    graph = decoder_graph(num_layers=2, has_qk_norm=False)
    capabilities = Capabilities(schedules=("plain",), unsupported_taps=("mlp.act",), keeps_cache=False)
    assert capabilities.all_unsupported_taps() == ("mlp.act", "k_cache", "v_cache")
    left_out = {f"model.layers.{layer}.{site}" for layer in (0, 1) for site in capabilities.all_unsupported_taps()}
    assert left_out.isdisjoint(capabilities.wanted(graph))
    assert len(capabilities.wanted(graph)) == len(graph) - len(left_out)
    assert Capabilities(schedules=()).wanted(graph) == [operation.tap for operation in graph]


def test_a_single_tap_may_be_lacking():
    graph = decoder_graph(num_layers=2, has_qk_norm=False)
    capabilities = Capabilities(schedules=("plain",), unsupported_taps=("model.layers.1.mlp.act",))
    assert set(graph.by_tap) - set(capabilities.wanted(graph)) == {"model.layers.1.mlp.act"}


def test_naming_the_engines_imports_no_torch():
    code = "import sys, harness.cli.main, harness.engines as e; e.engine_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_a_flag_is_true_or_false():
    assert (parse_flag("x", "true"), parse_flag("x", "false")) == (True, False)
    with pytest.raises(HarnessError) as caught:
        parse_flag("multiprocessing", "yes")
    assert caught.value.code is Code.BAD_OPTION
    assert (caught.value.what, caught.value.actual) == ("multiprocessing must be true or false", "yes")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("0.5", 0.5),
        ("true", True),
        ("None", None),
        ("False", False),
        ('{"a": [1]}', {"a": [1]}),
        ("fp8", "fp8"),
    ],
)
def test_a_value_is_json_where_it_is_json(text, value):
    assert parse_value(text) == value
