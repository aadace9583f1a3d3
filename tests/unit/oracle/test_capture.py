"""Capturing sees every tap once and changes nothing: not the outputs, not the library, not the model."""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from harness.oracle.capture import attending, capturing
from harness.taps import Kind

from .state import bits, surroundings

ATTENTIONS = ("sdpa", "eager")


class BoomError(Exception):
    """Raised by the tests."""


@contextmanager
def hf_attention(decoder, name):
    """HF's own attention of that name, with nothing of ours."""
    before = decoder.config._attn_implementation
    decoder.model.set_attn_implementation(name)
    try:
        yield
    finally:
        decoder.model.set_attn_implementation(before)


@torch.no_grad()
def run(decoder, token_ids, *, num_decoded=3):
    """Logits of a prefill, and of decode steps through HF's cache."""
    cache = DynamicCache(config=decoder.config)
    at = len(token_ids) - num_decoded
    pieces = [token_ids[:at], *([token] for token in token_ids[at:])]
    return [
        decoder.model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True).logits for piece in pieces
    ]


def row_shape(decoder, operation):
    """Shape of a row as docs/recording-format.md has it."""
    config, head_dim = decoder.config, decoder.head_dim()
    heads = config.num_attention_heads if "q_" in operation.site else config.num_key_value_heads
    sizes = {
        "self_attn.q_proj": (heads * head_dim,),
        "self_attn.k_proj": (heads * head_dim,),
        "self_attn.v_proj": (heads * head_dim,),
        "self_attn.q_norm": (heads, head_dim),
        "self_attn.k_norm": (heads, head_dim),
        "q_rope": (heads, head_dim),
        "k_rope": (heads, head_dim),
        "attention": (config.num_attention_heads * head_dim,),
        "mlp.gate_proj": (config.intermediate_size,),
        "mlp.up_proj": (config.intermediate_size,),
        "mlp.act": (config.intermediate_size,),
        "lm_head": (config.vocab_size,),
    }
    return sizes.get(operation.site, (config.hidden_size,))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_tap_arrives_once_with_its_shape(decoder, token_ids, attention):
    seen = []
    with capturing(decoder, lambda tap, tensor: seen.append((tap, tuple(tensor.shape))), attention=attention):
        run(decoder, token_ids, num_decoded=2)
    operations = [op for op in decoder.graph if op.kind is not Kind.CACHE]
    num_rows = (len(token_ids) - 2, 1, 1)
    expected = [(op.tap, (rows, *row_shape(decoder, op))) for rows in num_rows for op in operations]
    assert sorted(seen) == sorted(expected)


def test_taps_arrive_in_the_order_of_computation(decoder, token_ids):
    """Inputs before outputs, so that a consumer can work while it listens."""
    place = {}
    with capturing(decoder, lambda tap, _: place.setdefault(tap, len(place))):
        run(decoder, token_ids, num_decoded=0)
    wrong = [
        (op.tap, name)
        for op in decoder.graph
        for name in op.inputs
        if op.kind is not Kind.CACHE and place[name] > place[op.tap]
    ]
    assert wrong == []


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_outputs_are_bit_for_bit_those_without_capture(load, token_ids, name, dtype, attention):
    decoder = load(name, dtype)
    with hf_attention(decoder, attention):
        plain = run(decoder, token_ids)
    with capturing(decoder, lambda *_: None, attention=attention):
        captured = run(decoder, token_ids)
    assert all(torch.equal(a, b) for a, b in zip(captured, plain, strict=True))


def test_eager_and_sdpa_are_not_the_same_code(load, token_ids):
    """Otherwise the test above would pass with the setting ignored."""
    outputs = []
    for attention in ATTENTIONS:
        with capturing(load("qwen3-tiny", torch.bfloat16), lambda *_: None, attention=attention):
            outputs.append(run(load("qwen3-tiny", torch.bfloat16), token_ids)[0])
    assert not torch.equal(*outputs)


def test_padding_is_masked_under_capture(decoder, token_ids):
    """A batch with left padding takes HF's mask, which the attention setting's name must not lose."""
    pad = 4
    ids = torch.tensor([[0] * pad + token_ids, token_ids + [0] * pad])
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        plain = decoder.model(**call).logits
        with capturing(decoder, lambda *_: None):
            captured = decoder.model(**call).logits
    assert torch.equal(captured, plain)
    torch.testing.assert_close(captured[0, pad:], captured[1, : len(token_ids)], rtol=1e-4, atol=1e-4)


def test_what_is_captured_is_what_the_modules_computed(decoder, token_ids):
    """Names are not mixed up: each captured tap fits the modules around it, recomputed here by hand."""
    taps = {}
    with capturing(decoder, lambda tap, tensor: taps.__setitem__(tap, tensor.clone())):
        run(decoder, token_ids, num_decoded=0)
    layer, prefix = decoder.layers[1], "model.layers.1."
    at = {site.removeprefix(prefix): tensor for site, tensor in taps.items() if site.startswith(prefix)}
    with torch.no_grad():
        hidden = taps["model.layers.0.output"]
        normed = layer.input_layernorm(hidden)
        same(at["input_layernorm"], normed)
        for name in "qkv":
            same(at[f"self_attn.{name}_proj"], getattr(layer.self_attn, f"{name}_proj")(normed))
        same(at["self_attn.o_proj"], layer.self_attn.o_proj(at["attention"]))
        same(at["attn_residual"], hidden + at["self_attn.o_proj"])
        normed = layer.post_attention_layernorm(at["attn_residual"])
        same(at["post_attention_layernorm"], normed)
        same(at["mlp.gate_proj"], layer.mlp.gate_proj(normed))
        same(at["mlp.up_proj"], layer.mlp.up_proj(normed))
        same(at["mlp.act"], torch.nn.functional.silu(at["mlp.gate_proj"]) * at["mlp.up_proj"])
        same(at["mlp.down_proj"], layer.mlp.down_proj(at["mlp.act"]))
        same(at["output"], at["attn_residual"] + at["mlp.down_proj"])
        same(taps["model.norm"], decoder.model.model.norm(taps["model.layers.2.output"]))
        same(taps["lm_head"], decoder.model.lm_head(taps["model.norm"]))
        same(taps["model.embed_tokens"], decoder.model.model.embed_tokens(torch.tensor(token_ids)))
        # The first token is not rotated: its q_rope and k_rope are what went into the rotation.
        for name in "qk":
            before = at.get(f"self_attn.{name}_norm", at[f"self_attn.{name}_proj"])
            same(at[f"{name}_rope"][0].flatten(), before[0].flatten())
            assert not torch.allclose(at[f"{name}_rope"][1].flatten(), before[1].flatten(), atol=1e-3)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_a_decode_step_are_the_new_tokens(decoder, token_ids):
    whole, stepwise = [], []
    with attending(decoder, "sdpa", lambda tap, x: whole.append(x.clone()) if tap.endswith("2.k_rope") else None):
        run(decoder, token_ids, num_decoded=0)
    with attending(decoder, "sdpa", lambda tap, x: stepwise.append(x.clone()) if tap.endswith("2.k_rope") else None):
        run(decoder, token_ids, num_decoded=3)
    torch.testing.assert_close(torch.cat(stepwise), torch.cat(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_everything_is_put_back(decoder, token_ids, attention):
    before, weights = surroundings(decoder), bits(decoder.model)
    with capturing(decoder, lambda *_: None, attention=attention):
        assert surroundings(decoder) != before
        run(decoder, token_ids)
    assert surroundings(decoder) == before
    assert bits(decoder.model) == weights


def boom(at):
    def sink(tap, _):
        if tap == at:
            raise BoomError

    return sink


@pytest.mark.parametrize("tap", ["model.embed_tokens", "model.layers.1.q_rope", "model.layers.2.attention", "lm_head"])
def test_everything_is_put_back_when_the_sink_raises(decoder, token_ids, tap):
    before, plain = surroundings(decoder), run(decoder, token_ids)
    with pytest.raises(BoomError), capturing(decoder, boom(tap)):
        run(decoder, token_ids)
    assert surroundings(decoder) == before
    assert all(torch.equal(a, b) for a, b in zip(run(decoder, token_ids), plain, strict=True))


def test_everything_is_put_back_when_the_attention_is_unknown(decoder):
    before = surroundings(decoder)
    with pytest.raises(KeyError), capturing(decoder, lambda *_: None, attention="flash_attention_9"):
        pass
    assert surroundings(decoder) == before


def test_the_setting_found_is_the_setting_left(decoder, token_ids):
    with hf_attention(decoder, "eager"):
        with capturing(decoder, lambda *_: None):
            run(decoder, token_ids)
        assert decoder.config._attn_implementation == "eager"


def test_captures_of_two_models_do_not_mix(load, token_ids):
    """A capture inside of a capture: each sink gets its own model's taps, and only those."""
    outer, inner = load("llama-tiny"), load("qwen3-tiny")
    heard = {"outer": [], "inner": []}
    with capturing(outer, lambda tap, _: heard["outer"].append(tap)):
        with capturing(inner, lambda tap, _: heard["inner"].append(tap)):
            run(inner, token_ids, num_decoded=0)
        run(outer, token_ids, num_decoded=0)
    assert len(heard["inner"]) == sum(op.kind is not Kind.CACHE for op in inner.graph)
    assert len(heard["outer"]) == sum(op.kind is not Kind.CACHE for op in outer.graph)
