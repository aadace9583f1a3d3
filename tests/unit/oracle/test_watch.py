"""Watching sees every tap once and changes nothing unless it is told to: not the outputs, the library or the model."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from harness.formats.taps import Kind
from harness.oracle.caches import cache_argument
from harness.oracle.watch import Seeing, _Calls, _input_key, _Run, as_rows, run_attention, watching, window_of

from .state import bits, surroundings

ATTENTIONS = ("sdpa", "eager")


class BoomError(Exception):
    """Raised by the tests."""


@contextmanager
def hf_attention(hf, name):
    """HF's own attention of that name, with nothing of ours."""
    before = hf.config._attn_implementation
    hf.model.set_attn_implementation(name)
    try:
        yield
    finally:
        hf.model.set_attn_implementation(before)


@contextmanager
def seeing(hf, sink, *, attention=None):
    with watching(hf, attention=attention) as watch, watch.showing(Seeing(sink)):
        yield


@torch.no_grad()
def run(hf, token_ids, *, num_decoded=3):
    """Logits of a prefill, and of decode steps through HF's cache."""
    cache = {cache_argument(hf.model.forward): DynamicCache(config=hf.config)}
    at = len(token_ids) - num_decoded
    pieces = [token_ids[:at], *([token] for token in token_ids[at:])]
    return [hf.model(input_ids=torch.tensor([piece]), use_cache=True, **cache).logits for piece in pieces]


def taps_of(hf, token_ids, **options):
    """Rows of every tap of a prefill, in the order in which they were shown."""
    taps, operations = {}, hf.graph.by_source

    def sink(source, value):
        operation = operations.get(source)
        if operation is not None:
            taps[operation.tap] = as_rows(value, operation.token_dim, 1, len(token_ids)).clone()

    with seeing(hf, sink, **options):
        run(hf, token_ids, num_decoded=0)
    return taps


def row_shape(hf, operation):
    """Shape of a row as docs/recording-format.md has it."""
    config, head_dim = hf.config, hf.head_dim
    heads = config.num_attention_heads if "q_" in operation.site else config.num_key_value_heads
    sizes = {
        "self_attn.q_proj": (heads * head_dim,),
        "self_attn.k_proj": (heads * head_dim,),
        "self_attn.v_proj": (heads * head_dim,),
        "self_attn.q_norm": (heads, head_dim),
        "self_attn.k_norm": (heads, head_dim),
        "q_rope": (heads, head_dim),
        "k_rope": (heads, head_dim),
        "attention": (config.num_attention_heads, head_dim),
        "mlp.gate_proj": (config.intermediate_size,),
        "mlp.up_proj": (config.intermediate_size,),
        "mlp.act": (config.intermediate_size,),
        "lm_head": (config.vocab_size,),
    }
    return sizes.get(operation.site, (config.hidden_size,))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_tap_arrives_once_with_its_shape(hf, token_ids, attention):
    """In a prefill, and in a forward of one token."""
    operations = hf.graph.by_source
    for num_tokens in (len(token_ids), 1):
        seen = []

        def sink(source, value, seen=seen):
            if source in operations:
                seen.append((operations[source].tap, tuple(value.shape)))

        with seeing(hf, sink, attention=attention):
            run(hf, token_ids[:num_tokens], num_decoded=0)
        expected = []
        for operation in (op for op in hf.graph if op.kind is not Kind.CACHE):
            first, *rest = row_shape(hf, operation)
            shape = (1, first, num_tokens, *rest) if operation.token_dim == 2 else (1, num_tokens, first, *rest)
            expected.append((operation.tap, shape))
        assert seen == expected


def test_a_value_that_is_shown_again_has_a_number(hf, token_ids):
    """Two forwards in one block are two runs of each module, and must not be taken for one."""
    seen = []
    with seeing(hf, lambda source, _: seen.append(source)), torch.no_grad():
        for _ in range(2):
            hf.model(input_ids=torch.tensor([token_ids]), use_cache=False)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(set(seen)) == len(seen)
    assert second == [f"{source}@2" for source in first]


def test_taps_arrive_in_the_order_of_the_graph(hf, token_ids):
    """Inputs before outputs, so that a watcher can work while it looks."""
    assert list(taps_of(hf, token_ids)) == [op.tap for op in hf.graph if not op.is_kept]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "gpt_oss", "llama4_text", "mamba", "qwen3_moe"])
def test_taps_of_other_families_arrive_in_the_order_of_the_graph(tiny, family):
    hf, seen = tiny(family), []
    with seeing(hf, lambda source, _: seen.append(source)), torch.no_grad():
        hf.model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]), use_cache=False)
    expected = [op.source for op in hf.graph if not op.is_kept and op.tap != "logits"]
    assert [source for source in seen if source in hf.graph.by_source] == expected


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_outputs_are_bit_for_bit_those_without_a_watcher(load, token_ids, name, dtype, attention):
    hf = load(name, dtype)
    with hf_attention(hf, attention):
        plain = run(hf, token_ids)
    with seeing(hf, lambda *_: None, attention=attention):
        watched = run(hf, token_ids)
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))


def test_eager_and_sdpa_are_not_the_same_code(load, token_ids):
    """Otherwise the test above would pass with the setting ignored."""
    outputs = []
    for attention in ATTENTIONS:
        with seeing(load("qwen3-tiny", torch.bfloat16), lambda *_: None, attention=attention):
            outputs.append(run(load("qwen3-tiny", torch.bfloat16), token_ids)[0])
    assert not torch.equal(*outputs)


def test_padding_is_masked_while_it_is_watched(hf, token_ids):
    """A batch with left padding takes HF's mask, which the attention setting's name must not lose."""
    pad = 4
    ids = torch.tensor([[0] * pad + token_ids, token_ids + [0] * pad])
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        plain = hf.model(**call).logits
        with seeing(hf, lambda *_: None):
            watched = hf.model(**call).logits
    assert torch.equal(watched, plain)
    torch.testing.assert_close(watched[0, pad:], watched[1, : len(token_ids)], rtol=1e-4, atol=1e-4)


def test_what_is_shown_is_what_the_modules_computed(hf, token_ids):
    """Names are not mixed up: each tap fits the modules around it, recomputed here by hand."""
    taps = taps_of(hf, token_ids)
    layer, prefix = hf.module("model.layers.1"), "model.layers.1."
    at = {site.removeprefix(prefix): tensor for site, tensor in taps.items() if site.startswith(prefix)}
    with torch.no_grad():
        hidden = taps["model.layers.0.output"]
        normed = layer.input_layernorm(hidden)
        same(at["input_layernorm"], normed)
        for name in "qkv":
            same(at[f"self_attn.{name}_proj"], getattr(layer.self_attn, f"{name}_proj")(normed))
        same(at["self_attn.o_proj"], layer.self_attn.o_proj(at["attention"].flatten(1)))
        same(at["attn_residual"], hidden + at["self_attn.o_proj"])
        normed = layer.post_attention_layernorm(at["attn_residual"])
        same(at["post_attention_layernorm"], normed)
        same(at["mlp.gate_proj"], layer.mlp.gate_proj(normed))
        same(at["mlp.up_proj"], layer.mlp.up_proj(normed))
        same(at["mlp.act"], torch.nn.functional.silu(at["mlp.gate_proj"]) * at["mlp.up_proj"])
        same(at["mlp.down_proj"], layer.mlp.down_proj(at["mlp.act"]))
        same(at["output"], at["attn_residual"] + at["mlp.down_proj"])
        same(taps["model.norm"], hf.module("model.norm")(taps["model.layers.2.output"]))
        same(taps["lm_head"], hf.module("lm_head")(taps["model.norm"]))
        same(taps["model.embed_tokens"], hf.module("model.embed_tokens")(torch.tensor(token_ids)))
        # The first token is not rotated: its q_rope and k_rope are what went into the rotation.
        for name in "qk":
            before = at.get(f"self_attn.{name}_norm", at[f"self_attn.{name}_proj"])
            same(at[f"{name}_rope"][0].flatten(), before[0].flatten())
            assert not torch.allclose(at[f"{name}_rope"][1].flatten(), before[1].flatten(), atol=1e-3)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_a_decode_step_end_with_the_new_tokens(hf, token_ids):
    def keys_of(num_decoded):
        keys = []
        path = "model.layers.2.self_attn:key"
        with seeing(hf, lambda source, x: keys.append(x.clone()) if source.partition("@")[0] == path else None):
            run(hf, token_ids, num_decoded=num_decoded)
        return keys

    (whole,), stepwise = keys_of(0), keys_of(3)
    assert [key.shape[2] for key in stepwise] == [20, 21, 22, 23]
    for key in stepwise:
        torch.testing.assert_close(key, whole[:, :, : key.shape[2]], rtol=1e-4, atol=1e-4)


def test_attention_is_seen_with_its_window_and_its_options(tiny):
    seen = Seeing(lambda *_: None)
    for family in ("gemma2", "gpt_oss"):
        hf = tiny(family)
        with watching(hf) as watch, watch.showing(seen), torch.no_grad():
            hf.model(input_ids=torch.tensor([list(range(3, 12))]), use_cache=False)
        first, second = (seen.calls[f"model.layers.{layer}.self_attn"] for layer in (0, 1))
        assert [window_of(call) for call in (first, second)] == [5, None]
        assert first.query.shape == (1, 4, 9, 8)
        assert first.key.shape == first.value.shape == (1, 2, 9, 8)
    assert first.options["s_aux"] is hf.module("model.layers.0.self_attn").sinks


# What a watcher puts in the place of a value.


class Replacing:
    """Puts a value in the place of one source, and keeps all that is shown."""

    def __init__(self, source, make):
        self.source, self.make = source, make
        self.seen, self.chosen = {}, {}

    def see(self, source, value):
        self.seen[source] = value.clone()
        return self.make(value) if source == self.source else None

    def attend(self, call, function):
        return run_attention(call, function)

    def choose(self, source, scores, chosen):
        self.chosen[source] = (scores.clone(), chosen.clone())
        return self.make(chosen) if source == self.source else None


def replaced(hf, source, make, token_ids=(3, 9, 14, 27)):
    """What a forward shows, with one source replaced, and without."""
    watchers = [Replacing(item, make) for item in (source, None)]
    with watching(hf) as watch, torch.no_grad():
        for watcher in watchers:
            with watch.showing(watcher):
                hf.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return watchers


@pytest.mark.parametrize(
    ("source", "reader"),
    [
        ("model.embed_tokens", "model.layers.0.input_layernorm:input"),
        ("model.layers.0.mlp.down_proj:input", "model.layers.0.mlp.down_proj"),
        ("model.layers.1.self_attn:query", "model.layers.1.self_attn:context"),
        ("model.layers.1.self_attn:key", "model.layers.1.self_attn:context"),
        ("model.layers.1.self_attn:value", "model.layers.1.self_attn:context"),
        ("model.layers.1.self_attn:context", "model.layers.1.self_attn.o_proj"),
        ("model.layers.0", "model.layers.1.input_layernorm"),
        ("model.norm", "lm_head"),
    ],
)
def test_the_forward_goes_on_with_what_is_put_in_the_place_of_a_value(tiny, source, reader):
    hf = tiny("llama")
    changed, plain = replaced(hf, source, lambda x: x.flip(-1) * 1.5)
    order = list(plain.seen)
    before, after = order[: order.index(source) + 1], order[order.index(source) + 1 :]
    assert all(torch.equal(changed.seen[item], plain.seen[item]) for item in before), "nothing before it moves"
    assert not torch.allclose(changed.seen[reader], plain.seen[reader])
    assert reader in after


def test_the_value_that_is_put_in_place_is_the_one_that_is_read(tiny):
    hf = tiny("llama")
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(2))
    changed, _ = replaced(hf, "model.norm", lambda _: x)
    torch.testing.assert_close(changed.seen["lm_head"], x @ hf.module("lm_head").weight.T)


def test_one_of_several_outputs_of_a_module_is_replaced(tiny):
    """A router returns its logits, the experts' weights and the experts."""
    hf, gate = tiny("qwen3_moe"), "model.layers.0.mlp.gate"
    changed, plain = replaced(hf, f"{gate}:1", torch.zeros_like)
    assert torch.equal(changed.seen[f"{gate}:linear"], plain.seen[f"{gate}:linear"])
    assert not changed.seen["model.layers.0.mlp.experts"].any(), "experts of weight zero give nothing"
    assert plain.seen["model.layers.0.mlp.experts"].any()


def test_a_product_with_a_weight_of_ones_own_is_shown_and_replaced(tiny):
    """Most routers multiply with their weight by a function; no module has that product."""
    hf, gate = tiny("qwen3_moe"), "model.layers.0.mlp.gate"
    changed, plain = replaced(hf, f"{gate}:linear", torch.neg)
    rows = plain.seen[f"{gate}:input"]
    torch.testing.assert_close(plain.seen[f"{gate}:linear"], rows @ hf.module(gate).weight.T)
    scores, chosen = plain.chosen[f"{gate}:topk"]
    assert torch.equal(chosen, scores.topk(2, dim=-1).indices)
    worst = plain.seen[f"{gate}:linear"].topk(2, dim=-1, largest=False).indices
    assert torch.equal(changed.chosen[f"{gate}:topk"][1].sort().values, worst.sort().values)


def test_a_choice_is_shown_with_its_scores_and_replaced(tiny):
    """The experts then compute what was put in its place, weighted by their own scores."""
    hf, path = tiny("qwen3_moe"), "model.layers.0.mlp"
    changed, plain = replaced(hf, f"{path}.gate:topk", lambda chosen: (chosen + 1) % 4)
    scores, chosen = plain.chosen[f"{path}.gate:topk"]
    assert scores.shape == (4, 4)
    assert torch.equal(chosen, scores.topk(2, dim=-1).indices)
    replacement = scores.gather(-1, (chosen + 1) % 4)
    torch.testing.assert_close(changed.seen[f"{path}.gate:1"], replacement)
    assert not torch.allclose(changed.seen[f"{path}.experts"], plain.seen[f"{path}.experts"])


def test_what_a_watcher_computes_is_not_shown(tiny):
    hf, seen = tiny("qwen3_moe"), []

    class Busy(Seeing):
        def choose(self, source, scores, chosen):
            seen.append(source)
            scores.topk(1)
            torch.nn.functional.linear(scores, torch.ones(2, 4))

    with watching(hf) as watch, watch.showing(Busy(lambda *_: None)), torch.no_grad():
        hf.model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    assert seen == ["model.layers.0.mlp.gate:topk", "model.layers.1.mlp.gate:topk"]


# What is left behind.


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_everything_is_put_back(hf, token_ids, attention):
    before, weights = surroundings(hf), bits(hf.model)
    with seeing(hf, lambda *_: None, attention=attention):
        assert surroundings(hf) != before
        run(hf, token_ids)
    assert surroundings(hf) == before
    assert bits(hf.model) == weights


def boom(at):
    def sink(source, _):
        if source == at:
            raise BoomError

    return sink


@pytest.mark.parametrize(
    "source", ["model.embed_tokens", "model.layers.1.self_attn:query", "model.layers.2.self_attn:context", "lm_head"]
)
def test_everything_is_put_back_when_the_watcher_raises(hf, token_ids, source):
    before, plain = surroundings(hf), run(hf, token_ids)
    with pytest.raises(BoomError), seeing(hf, boom(source)):
        run(hf, token_ids)
    assert surroundings(hf) == before
    assert all(torch.equal(a, b) for a, b in zip(run(hf, token_ids), plain, strict=True))


def test_a_watch_can_be_used_again_after_a_forward_that_raised(hf, token_ids):
    """Where the run stood is forgotten: the second forward's names are those of a first one."""
    seen = []
    with watching(hf) as watch:
        with pytest.raises(BoomError), watch.showing(Seeing(boom("model.layers.1.mlp"))):
            run(hf, token_ids)
        with watch.showing(Seeing(lambda source, _: seen.append(source))):
            run(hf, token_ids, num_decoded=0)
    assert "model.layers.0" in seen
    assert not [source for source in seen if "@" in source]


def test_an_attention_that_somebody_has_registered_is_the_one_that_runs(hf, token_ids):
    """A kernel under test that was replaced by HF's own would always be right."""

    def doubled(module, query, key, value, mask, **options):
        context, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, **options)
        return 2 * context, weights

    AttentionInterface.register("doubled", doubled)
    try:
        with hf_attention(hf, "sdpa"):
            once = taps_of(hf, token_ids)["model.layers.0.attention"]
        with hf_attention(hf, "doubled"):
            twice = taps_of(hf, token_ids)["model.layers.0.attention"]
    finally:
        AttentionInterface._global_mapping.pop("doubled")
    torch.testing.assert_close(twice, 2 * once, rtol=1e-5, atol=1e-5)


def test_everything_is_put_back_when_the_attention_is_unknown(hf):
    before = surroundings(hf)
    with pytest.raises(KeyError), watching(hf, attention="flash_attention_9"):
        pass
    assert surroundings(hf) == before


def test_the_setting_found_is_the_setting_left(hf, token_ids):
    with hf_attention(hf, "eager"):
        with seeing(hf, lambda *_: None):
            run(hf, token_ids)
        assert hf.config._attn_implementation == "eager"


def test_watches_of_two_models_do_not_mix(load, token_ids):
    """One inside of the other: each watcher gets its own model's values, and only those."""
    outer, inner = load("llama-tiny"), load("qwen3-tiny")
    heard = {"outer": [], "inner": []}
    with seeing(outer, lambda source, _: heard["outer"].append(source)):
        with seeing(inner, lambda source, _: heard["inner"].append(source)):
            run(inner, token_ids, num_decoded=0)
        run(outer, token_ids, num_decoded=0)
    for hf, sources in ((inner, heard["inner"]), (outer, heard["outer"])):
        assert len(set(sources) & set(hf.graph.by_source)) == sum(op.kind is not Kind.CACHE for op in hf.graph)
        assert not [source for source in sources if "@" in source]
    assert {source for source in heard["inner"] if "q_norm" in source}
    assert not {source for source in heard["outer"] if "q_norm" in source}


def test_a_forward_is_shown_to_the_watcher_of_its_thread_alone(load, token_ids):
    """Truth and control run in two threads over one model."""
    hf, heard = load("llama-tiny"), {"here": [], "there": []}
    with watching(hf) as watch, watch.showing(Seeing(lambda source, _: heard["here"].append(source))):

        def there():
            with watch.showing(Seeing(lambda source, _: heard["there"].append(source))):
                run(hf, token_ids, num_decoded=0)

        def unseen():
            run(hf, token_ids, num_decoded=0)

        for function in (there, unseen):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
        assert heard["here"] == []
        run(hf, token_ids, num_decoded=0)
    assert heard["here"] == heard["there"] != []


# Parts by hand.

X, IDS = torch.ones(2), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        ((X,), {}, 0), ((IDS, X, X), {}, 1), ((IDS,), {"mask": None, "x": X}, "x"),
        ((), {"a": IDS, "b": X, "c": X}, "b"),
        ((X,), {"hidden_states": X}, "hidden_states"), ((X,), {"hidden_states": None}, 0), ((IDS, None, "x"), {}, None),
        ((), {}, None), ((), {"hidden_states": IDS}, "hidden_states"),
    ],
)  # fmt: skip
def test_the_first_input_that_is_shown(args, kwargs, key):
    assert _input_key(args, kwargs) == key


def running(modules=()):
    """A forward that is watched, of modules by their paths, and what it shows."""
    shown = []
    watcher = SimpleNamespace(
        see=lambda source, value: shown.append((source, value)), choose=lambda *choice: shown.append(choice)
    )
    hf = SimpleNamespace(module=dict(modules).__getitem__)
    return _Run(hf, watcher), shown


def test_the_module_that_is_run_is_the_innermost_that_has_not_returned():
    run, _ = running()
    assert run.path == ""
    for path in ("a", "a.b", "a.b.c"):
        run.enter(path)
        assert run.path == path
    run.leave("a.b.c")
    assert run.path == "a.b"
    run.enter("a.b.d")
    run.enter("a.b.d.e")  # which raised, and was caught by what calls it
    run.leave("a.b.d")
    assert run.path == "a.b"
    run.leave("a")
    assert run.path == ""
    run.leave("a")
    assert run.path == ""


def test_what_is_shown_again_says_how_often():
    run, shown = running()
    for source in ("a", "b", "a", "a"):
        run.show(source, X)
    run.show("a", IDS)
    run.show("a", None)
    run.enter("gate")
    run.show_choice(X, IDS)
    run.show_choice(X, IDS)
    assert [source for source, *_ in shown] == ["a", "b", "a@2", "a@3", "gate:topk", "gate:topk@2"]


def test_a_weight_is_own_to_a_module_that_is_no_linear_one():
    gate, linear = torch.nn.Module(), torch.nn.Linear(2, 2)
    gate.weight = torch.nn.Parameter(torch.ones(2, 2))
    run, _ = running({"gate": gate, "linear": linear, "plain": torch.nn.Module()})
    assert not run.is_own_weight(gate.weight), "no module is being run"
    for path, weight, is_own in (
        ("gate", gate.weight, True), ("gate", linear.weight, False), ("linear", linear.weight, False),
        ("plain", gate.weight, False),
    ):  # fmt: skip
        run.enter(path)
        assert run.is_own_weight(weight) == is_own
        run.leave(path)


def test_products_with_a_weight_of_the_modules_own_are_shown_however_it_is_given():
    gate, identity = torch.nn.Module(), torch.eye(2)
    gate.weight = torch.nn.Parameter(2 * torch.eye(2), requires_grad=False)
    run, shown = running({"gate": gate})
    run.enter("gate")
    with _Calls(run):
        for weight in (gate.weight, identity):
            assert (
                torch.nn.functional.linear(X, weight).tolist() == torch.nn.functional.linear(X, weight=weight).tolist()
            )
        torch.topk(X, 1)
        X.topk(1)
    assert [source for source, *_ in shown] == ["gate:linear", "gate:topk", "gate:topk@2"]
