"""Kinds, names and inputs of operations, from what was run for them; by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.oracle import graph
from harness.oracle.flow import Origin
from harness.oracle.trace import Shown


def kind_of(source, sources, *ran):
    origin = Origin(tuple(sources), tuple(ran))
    return graph._kind(Shown(source=source, origin=origin, token_dim=1, rows=torch.zeros(1, 1)))


@pytest.mark.parametrize(
    ("source", "sources", "ran", "kind"),
    [
        ("gate:topk", "x", ["topk"], Kind.CHOICE),
        ("attn:context", "qkv", ["softmax"], Kind.ATTENTION),
        ("attn:query", "x", ["mul", "add"], Kind.ROTARY),
        ("attn:query", "x", ["mul"], Kind.OTHER),
        ("attn:key", "x", ["mul", "neg"], Kind.ROTARY),
        ("attn:value", "x", ["mul"], Kind.OTHER),
        ("attn:query", "x", [], Kind.COPY),
        ("norm", "x", [], Kind.COPY),
        ("embed", "", ["embedding"], Kind.EMBEDDING),
        ("embed", "", ["embedding", "mul"], Kind.OTHER),
        ("proj", "x", ["addmm"], Kind.LINEAR),
        ("proj", "x", ["mm", "add"], Kind.LINEAR),
        ("proj", "x", ["mm", "addmm"], Kind.OTHER),
        ("proj", "x", ["mm", "mul"], Kind.OTHER),
        ("proj", "xy", ["mm"], Kind.OTHER),
        ("proj", "", ["mm"], Kind.OTHER),
        ("proj:input", "x", ["mm"], Kind.OTHER),
        ("gate:linear", "x", ["mm"], Kind.LINEAR),
        ("gate:linear@2", "x", ["mm"], Kind.LINEAR),
        ("gate:1", "x", ["bmm"], Kind.LINEAR),
        ("gate:one", "x", ["bmm"], Kind.OTHER),
        ("norm", "x", ["rsqrt", "mul", "mean"], Kind.NORM),
        ("norm", "x", ["native_layer_norm"], Kind.NORM),
        ("norm", "xy", ["rsqrt"], Kind.OTHER),
        ("norm", "x", ["rsqrt", "mm"], Kind.OTHER),
        ("norm:input", "x", ["rsqrt"], Kind.OTHER),
        ("norm:input", "xy", ["add"], Kind.ADD),
        ("layer", "xy", ["add"], Kind.ADD),
        ("layer", "x", ["add"], Kind.OTHER),
        ("layer", "xyz", ["add"], Kind.OTHER),
        ("layer", "xy", ["add", "mul"], Kind.OTHER),
        ("down:input", "xy", ["silu", "mul"], Kind.ACTIVATION),
        ("down:input", "x", ["gelu"], Kind.ACTIVATION),
        ("down:input", "xy", ["mul"], Kind.OTHER),
        ("down:input", "xy", ["silu", "mul", "add"], Kind.OTHER),
    ],
)
def test_kinds(source, sources, ran, kind):
    assert kind_of(source, sources, *ran) is kind


def op(source, kind=Kind.OTHER, inputs=(), **more):
    return Operation(tap=more.pop("tap", source), kind=kind, inputs=tuple(inputs), source=source, **more)


LAYERS, HEAD = {"model.layers.0", "model.layers.1"}, "lm_head"


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (op("lm_head", Kind.LINEAR), "lm_head"),
        (op("model.layers.1", Kind.ADD), "model.layers.1.output"),
        (op("model.norm", Kind.NORM), "model.norm"),
        (op("model.norm:input", Kind.ADD), "model.norm.input"),
        (op("model.layers.0.attn:context", Kind.ATTENTION), "model.layers.0.attention"),
        (op("model.layers.0.attn:query", Kind.ROTARY), "model.layers.0.q_rope"),
        (op("model.layers.0.attn:key", Kind.ROTARY), "model.layers.0.k_rope"),
        (op("model.layers.0.post:input", Kind.ADD), "model.layers.0.attn_residual"),
        (op("model.layers.0.post", Kind.ADD), "model.layers.0.post"),
        (op("model.layers.0.mlp.down:input", Kind.ACTIVATION), "model.layers.0.mlp.act"),
        (op("model.layers.0.mlp.down", Kind.ACTIVATION), "model.layers.0.mlp.down"),
        (op("model.layers.0.mlp.gate:linear", Kind.LINEAR), "model.layers.0.mlp.gate"),
        (op("model.layers.0.mlp.gate:1", Kind.OTHER), "model.layers.0.mlp.gate.1"),
    ],
)
def test_short_names(operation, name):
    assert graph._short_name(operation, LAYERS, set(), HEAD) == name


def test_a_short_name_is_given_once():
    taken = {"model.layers.0.attn_residual"}
    again = op("model.layers.0.other:input", Kind.ADD)
    assert graph._short_name(again, LAYERS, taken, HEAD) == "model.layers.0.other.input"


class Model(nn.Module):
    """A decoder of one layer, whose modules have the names that values are given."""

    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.attention, layer.mlp = nn.Linear(1, 1), nn.Linear(1, 1)
        self.model.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(1, 1)

    def get_output_embeddings(self):
        return self.lm_head


def hf(parts=("model.layers.0", "lm_head")):
    return SimpleNamespace(model=Model(), parts=parts, tokens_ahead=lambda _path: 0)


def test_a_name_that_is_a_modules_is_given_to_no_other_value():
    operations = [
        op("model.layers.0.attn:context", Kind.ATTENTION), op("model.layers.0.mlp", Kind.LINEAR),
        op("model.layers.0", Kind.ADD), op("lm_head", Kind.LINEAR),
    ]  # fmt: skip
    assert graph._names(hf(), operations, {}) == {
        "model.layers.0.attn:context": "model.layers.0.attn.context",
        "model.layers.0.mlp": "model.layers.0.mlp",
        "model.layers.0": "model.layers.0.output",
        "lm_head": "lm_head",
    }
    aliases = {"model.layers.0.attention": "model.layers.0.attn:context"}
    assert graph._names(hf(), operations[:1], aliases)["model.layers.0.attn:context"] == "model.layers.0.attention"


def test_of_two_values_with_one_name_the_second_has_that_of_its_source():
    operations = [op("model.layers.0.a:input", Kind.ADD), op("model.layers.0.b:input", Kind.ADD)]
    assert list(graph._names(hf(), operations, {}).values()) == [
        "model.layers.0.attn_residual", "model.layers.0.b.input",
    ]  # fmt: skip


def test_parts_of_a_value_are_the_value_but_for_what_attention_reads():
    operations = [
        op("qkv"), op("qkv:1", Kind.COPY, ["qkv"]), op("half", Kind.COPY, ["qkv:1"]),
        op("attn:query", Kind.COPY, ["half"]), op("both", Kind.COPY, ["qkv", "x"]),
        op("sum", Kind.ADD, ["half", "qkv", "other"]),
    ]  # fmt: skip
    inputs = {part.source: part.inputs for part in graph._without_parts(operations)}
    assert inputs == {
        "qkv": (), "attn:query": ("qkv",), "both": ("qkv", "x"), "sum": ("qkv", "other"),
    }  # fmt: skip


def test_attention_reads_its_own_interface():
    shown = {f"attn:{part}": None for part in ("query", "value")} | {"k": None, "mask": None}
    seen = SimpleNamespace(aliases={"attn:key": "k"}, shown=shown, windows={"attn": 7})
    context = op("attn:context", Kind.ATTENTION, ["mask", "x"])
    attention = graph._attention(context, seen)
    assert attention.inputs == ("attn:query", "k", "attn:value")
    assert (attention.window, attention.kind) == (7, Kind.ATTENTION)
    addition = op("sum", Kind.ADD, ["x"])
    assert graph._attention(addition, seen) is addition
    del shown["k"]
    assert graph._attention(context, seen) == op("attn:context", Kind.OTHER, ["mask", "x"])


def test_attention_among_other_things_than_tokens_is_none():
    """As inkling2's, whose queries choose among the sums of earlier layers."""
    shown = {f"attn:{part}": None for part in ("query", "key", "value")}
    seen = SimpleNamespace(aliases={}, shown=shown, windows={})
    context = replace(op("attn:context", Kind.ATTENTION, ["mask", "x"]), token_dim=2)
    assert graph._attention(context, seen).kind is Kind.OTHER


def test_caches_stand_before_the_attention_that_reads_them():
    def attention(layer, window):
        prefix = f"model.layers.{layer}."
        inputs = [f"{prefix}{name}" for name in ("q", "k", "v")]
        return op(f"{prefix}attention", Kind.ATTENTION, inputs, window=window)

    written = [op(f"model.layers.{at}.{name}", shape=(at + 1, len(name)), inputs=()) for at in (0, 1) for name in "qkv"]
    outside = op("attention", Kind.ATTENTION, ["q", "k", "v"])
    operations = list(graph._with_caches([*written, attention(0, None), attention(1, 4), outside], {}, {0: 9, 1: 8}))
    assert [item.tap for item in operations[6:]] == [
        "model.layers.0.k_cache", "model.layers.0.v_cache", "model.layers.0.attention",
        "model.layers.1.k_cache", "model.layers.1.v_cache", "model.layers.1.attention", "attention",
    ]  # fmt: skip
    caches = [item for item in operations if item.kind is Kind.CACHE]
    assert [cache.window for cache in caches] == [9, 9, 4, 4]
    assert [cache.inputs for cache in caches[:2]] == [("model.layers.0.k",), ("model.layers.0.v",)]
    assert [cache.shape for cache in caches] == [(1, 1), (1, 1), (2, 1), (2, 1)]
    assert {cache.source for cache in caches} == {""}


def test_caches_of_latent_attention_hold_what_it_expands():
    written = [
        op(f"model.layers.0.{name}", shape=(len(name),), inputs=()) for name in ("q", "k", "v", "latent", "turned")
    ]
    inputs = [item.tap for item in written[:3]]
    attention = replace(
        op("model.layers.0.attention", Kind.ATTENTION, inputs), source="model.layers.0.self_attn:context"
    )
    aliases = {
        "model.layers.0.self_attn:latent": "model.layers.0.latent",
        "model.layers.0.self_attn:rotary_key": "model.layers.0.turned",
    }
    *_, key, value, last = graph._with_caches([*written, attention], aliases, {})
    assert (key.tap, key.inputs, key.shape) == ("model.layers.0.k_cache", ("model.layers.0.latent",), (6,))
    assert (value.tap, value.inputs, value.shape) == ("model.layers.0.v_cache", ("model.layers.0.turned",), (6,))
    assert last.inputs == tuple(inputs)


def shown(source, sources=(), *ran, width=3):
    origin = Origin(tuple(sources), tuple(ran))
    return Shown(source=source, origin=origin, token_dim=1, rows=torch.zeros(2, width))


def test_the_operations_of_a_run():
    values = [
        shown("model.embed", (), "embedding"),
        shown("model.layers.0.norm", ["model.embed"], "rsqrt", "mul"),
        shown("model.layers.0.mlp", ["model.layers.0.norm"], "mm", width=5),
        shown("model.layers.0.part", ["model.layers.0.mlp"]),
        shown("model.layers.0", ["model.embed", "model.layers.0.part"], "add"),
        shown("model.norm", ["model.layers.0"], "rsqrt"),
        shown("lm_head", ["model.norm"], "mm"),
    ]
    aliases = {"logits": "lm_head", "model.norm:input": "model.layers.0", "lost": "nowhere"}
    seen = SimpleNamespace(shown={value.source: value for value in values}, aliases=aliases, windows={})
    traced = graph._named(hf(), seen)
    assert [(item.tap, item.kind, item.inputs) for item in traced] == [
        ("model.embed", Kind.EMBEDDING, ()),
        ("model.layers.0.norm", Kind.NORM, ("model.embed",)),
        ("model.layers.0.mlp", Kind.LINEAR, ("model.layers.0.norm",)),
        ("model.layers.0.output", Kind.ADD, ("model.embed", "model.layers.0.mlp")),
        ("model.norm", Kind.NORM, ("model.layers.0.output",)),
        ("lm_head", Kind.LINEAR, ("model.norm",)),
    ]
    assert [item.sampled_only for item in traced] == [False] * 4 + [True, True]
    assert [item.is_head for item in traced] == [False] * 5 + [True]
    assert [item.shape for item in traced] == [(3,), (3,), (5,), (3,), (3,), (3,)]
    assert traced.aliases == {
        "logits": "lm_head", "model.norm:input": "model.layers.0.output", "model.layers.0": "model.layers.0.output",
        "model.norm.input": "model.layers.0.output",
    }  # fmt: skip


def test_without_layers_nothing_is_the_head():
    values = [shown("model.embed", (), "embedding"), shown("lm_head", ["model.embed"], "mm")]
    seen = SimpleNamespace(shown={value.source: value for value in values}, aliases={}, windows={})
    assert [item.sampled_only for item in graph._named(hf(("lm_head",)), seen)] == [False, False]
