"""Names of modules: what an entry is about, which of several counts, and what is refused."""

import pytest

from harness.engines.module.engine import ModuleNames, operation_of
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation

from ..decoder_graph import decoder_graph

GRAPH = decoder_graph(num_layers=2, has_qk_norm=False)


@pytest.mark.parametrize(
    ("names", "theirs", "ours"),
    [
        ({}, "model.norm", "model.norm"),
        ({"ln": "model.norm"}, "ln", "model.norm"),
        ({"ln": "model.norm"}, "ln:input", "model.norm:input"),
        ({"ln": "model.norm"}, "ln2", "ln2"),
        ({"body": "model"}, "body.layers.0.mlp", "model.layers.0.mlp"),
        ({"": "model"}, "layers.0.mlp:1", "model.layers.0.mlp:1"),
        ({"inner": ""}, "inner.model.norm", "model.norm"),
        ({"blocks.*": "model.layers.*"}, "blocks.12.mlp", "model.layers.12.mlp"),
        ({"a.*.b.*.c": "x.*.*"}, "a.1.b.2.c.d", "x.1.2.d"),
        (
            {"blocks.*": "model.layers.*", "blocks.*.ff": "model.layers.*.mlp"},
            "blocks.1.ff.up",
            "model.layers.1.mlp.up",
        ),
        ({"blocks.*": "a.*", "blocks.0": "b.0"}, "blocks.0", "b.0"),
        ({"rope:0": "q_rope", "rope": "rotary"}, "rope:0", "q_rope"),
        ({"rope:0": "q_rope", "rope": "rotary"}, "rope:1", "rotary:1"),
        ({"rope:0": "q_rope"}, "rope", "rope"),
        ({"rope:0": "q_rope"}, "rope.table:0", "rope.table:0"),
        ({"a.b": "x"}, "a", "a"),
    ],
)
def test_a_name_is_translated_by_the_most_specific_entry(names, theirs, ours):
    assert ModuleNames(names).translate(theirs) == ours


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"blocks.*": "model.layers.0"}, "another number of *"),
        ({"ln": 3}, "must map paths to paths"),
        ({3: "model.norm"}, "must map paths to paths"),
    ],
)
def test_what_is_no_pair_of_names_is_refused(names, words):
    with pytest.raises(HarnessError, match="H013") as caught:
        ModuleNames(names)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"blocks.*.ln1": "model.layers.*.input_layernorm"}, ["My has no module 'blocks.*.ln1'", "body.0.ln"]),
        ({"body.*.ln": "model.layers.*.input_norm"}, ["nothing called 'model.layers.0.input_norm'", "input_layernorm"]),
        ({"body.*": "model.layers.*", "extra.*": "model.layers.*"}, ["'model.layers.2'"]),
        ({"body.0": "model.norm", "body.1": "model.norm"}, ["'body.0' and 'body.1' are both called 'model.norm'"]),
    ],
)
def test_entries_that_lead_nowhere_or_two_to_one_place_are_refused(names, words):
    paths = ["", "body", "body.0", "body.1", "body.0.ln", "body.1.ln", "extra", "extra.2"]
    with pytest.raises(HarnessError) as caught:
        ModuleNames(names).check("My", paths, GRAPH)
    assert caught.value.code is Code.BAD_OPTION
    for word in words:
        assert word in str(caught.value)


def test_entries_that_fit_are_accepted():
    names = {"": "model", "body": "model.layers", "body.*.ln": "model.layers.*.input_layernorm", "rope:0": ""}
    ModuleNames(names).check("My", ["", "body", "body.0", "body.1", "body.0.ln", "body.1.ln", "rope"], GRAPH)


def test_a_tap_is_found_under_each_of_its_names():
    norm = Operation(tap="model.layers.0.norm", kind=Kind.NORM, source="model.layers.0.norm")
    act = Operation(tap="model.layers.0.mlp.act", kind=Kind.ACTIVATION, source="model.layers.0.mlp.down:input")
    graph = Graph((norm, act), {"model.layers.0.mlp:input": norm.tap})
    names = (
        "model.layers.0.norm",
        "model.layers.0.mlp:input",
        "model.layers.0.mlp.act",
        "model.layers.0.mlp.down:input",
    )
    assert [operation_of(graph, name) for name in names] == [norm, norm, act, act]
    assert operation_of(graph, "model.layers.0.mlp.down") is None
