from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams

from .recorder import Recorder

LAYER_TAPS = [
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "q_rope", "k_rope", "attention",
    "self_attn.o_proj", "attn_residual", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act",
    "mlp.down_proj", "output",
]  # fmt: skip
QK_NORM_TAPS = ["self_attn.q_norm", "self_attn.k_norm"]


def record(checkpoint: Any, prompts: list[list[int]], num_new: int = 4, **config: Any) -> tuple[Recorder, LLMEngine]:
    recorder = Recorder()
    engine = LLMEngine(checkpoint.folder, EngineConfig(**config), observer=recorder)
    engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True))
    return recorder, engine


@pytest.mark.parametrize("checkpoint", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("backend", ["paged", "contiguous", "recompute"])
def test_every_step_shows_every_tap_in_its_shape(checkpoint: Any, backend: str) -> None:
    recorder, engine = record(checkpoint, [[4, 5, 6], [7]], attention_backend=backend)
    c = engine.model_config
    heads = {"self_attn.q_norm": c.num_attention_heads, "self_attn.k_norm": c.num_key_value_heads}
    widths = {"self_attn.q_proj": c.num_attention_heads * c.head_dim, "attention": c.num_attention_heads * c.head_dim}
    widths |= {f"self_attn.{x}_proj": c.num_key_value_heads * c.head_dim for x in "kv"}
    widths |= {f"mlp.{x}": c.intermediate_size for x in ("gate_proj", "up_proj", "act")}
    heads |= {"q_rope": c.num_attention_heads, "k_rope": c.num_key_value_heads}
    names = LAYER_TAPS + (QK_NORM_TAPS if c.qk_norm else [])
    for step, taps in zip(recorder.steps, recorder.taps, strict=True):
        if step.phase == "readback":
            continue
        num_rows = len(step.positions)
        expected = {"model.embed_tokens": (num_rows, c.hidden_size), "model.norm": (num_rows, c.hidden_size)}
        expected["lm_head"] = (len(step.sampled_rows), c.vocab_size)
        for layer in range(c.num_hidden_layers):
            for name in names:
                tail = (heads[name], c.head_dim) if name in heads else (widths.get(name, c.hidden_size),)
                expected[f"model.layers.{layer}.{name}"] = (num_rows, *tail)
        assert {name: tuple(tensor.shape) for name, tensor in taps.items()} == expected


@pytest.mark.parametrize("checkpoint", ["llama", "qwen2", "qwen3"], indirect=True)
def test_the_taps_are_transformers_modules_outputs(checkpoint: Any) -> None:
    prompt = [4, 5, 6, 7, 8]
    recorder, engine = record(checkpoint, [prompt], num_new=1)
    captured: dict[str, torch.Tensor] = {}
    names = [n for n, _ in checkpoint.model.named_modules() if n in recorder.taps[0] and n != "lm_head"]
    handles = [
        checkpoint.model.get_submodule(n).register_forward_hook(lambda m, i, out, n=n: captured.__setitem__(n, out[0]))
        for n in names
    ]
    checkpoint.logits(prompt)
    for handle in handles:
        handle.remove()
    assert len(names) == 2 + engine.model_config.num_hidden_layers * (11 if engine.model_config.qk_norm else 9)
    for name in names:
        torch.testing.assert_close(recorder.taps[0][name], captured[name], rtol=1e-4, atol=1e-5, msg=name)


def test_phases_rows_and_samples(checkpoint: Any) -> None:
    recorder, _ = record(checkpoint, [[4, 5, 6], [7, 8, 9, 10, 11]], num_new=2, max_num_batched_tokens=6)
    seen = [(s.phase, list(s.request_ids), list(s.positions), list(s.sampled_rows)) for s in recorder.steps]
    assert seen == [
        ("prefill", [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [2]),
        ("mixed", [0, 1, 1], [3, 3, 4], [0, 2]),
        ("readback", [0, 0, 0, 0], [0, 1, 2, 3], []),
        ("decode", [1], [5], [0]),
        ("readback", [1] * 6, [0, 1, 2, 3, 4, 5], []),
    ]
    assert [len(sampled) for sampled in recorder.sampled] == [1, 2, 0, 1, 0]
    for sampled, taps in zip(recorder.sampled, recorder.taps, strict=True):
        if "lm_head" in taps:
            assert taps["lm_head"].argmax(dim=-1).tolist() == sampled


def test_a_chunk_that_samples_nothing_has_no_logits(checkpoint: Any) -> None:
    recorder, _ = record(checkpoint, [[4, 5, 6]], num_new=1, max_num_batched_tokens=2)
    assert [list(step.sampled_rows) for step in recorder.steps] == [[], [0], []]
    assert ["lm_head" in taps for taps in recorder.taps] == [False, True, False]


@pytest.mark.parametrize("checkpoint", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("budget", [3, 2048])
def test_what_is_read_back_is_what_was_written_bit_for_bit(checkpoint: Any, backend: str, budget: int) -> None:
    config = {"attention_backend": backend, "block_size": 3, "max_num_batched_tokens": budget, "dtype": "bfloat16"}
    recorder, engine = record(checkpoint, [[4, 5, 6, 7, 8, 9, 10], [11, 12]], num_new=5, **config)
    num_kv_heads, head_dim = engine.model_config.num_key_value_heads, engine.model_config.head_dim
    for request_id, num_computed in ((0, 11), (1, 6)):
        for layer in range(engine.model_config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            k_cache = recorder.rows(prefix + "k_cache", request_id)
            assert len(k_cache) == num_computed
            assert torch.equal(k_cache, recorder.rows(prefix + "k_rope", request_id))
            v = recorder.rows(prefix + "self_attn.v_proj", request_id).view(-1, num_kv_heads, head_dim)
            assert torch.equal(recorder.rows(prefix + "v_cache", request_id), v)


def test_slots_and_tables_are_told_for_paged_only(checkpoint: Any) -> None:
    recorder, _ = record(checkpoint, [[4, 5, 6], [7]], block_size=2)
    for step in recorder.steps:
        assert set(step.block_tables) == set(step.request_ids)
        for request_id, position, slot in zip(step.request_ids, step.positions, step.slot_mapping, strict=True):
            assert slot == step.block_tables[request_id][position // 2] * 2 + position % 2
    for backend in ("contiguous", "recompute"):
        recorder, _ = record(checkpoint, [[4]], attention_backend=backend)
        assert all(not step.slot_mapping and not step.block_tables for step in recorder.steps)


def test_recompute_shows_the_whole_prefix_and_nothing_to_read_back(checkpoint: Any) -> None:
    recorder, _ = record(checkpoint, [[4, 5, 6]], num_new=3, attention_backend="recompute")
    assert [list(step.positions) for step in recorder.steps] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert [step.phase for step in recorder.steps] == ["prefill", "decode", "decode"]


def test_an_abort_reads_back_what_was_computed(checkpoint: Any) -> None:
    recorder = Recorder()
    engine = LLMEngine(checkpoint.folder, EngineConfig(max_num_batched_tokens=2), observer=recorder)
    request_id = engine.add_request([4, 5, 6, 7])
    engine.step()
    engine.abort(request_id)
    assert [(step.phase, list(step.positions)) for step in recorder.steps] == [
        ("prefill", [0, 1]),
        ("readback", [0, 1]),
    ]


def test_an_observer_may_come_and_go_between_steps(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    engine.add_request([4, 5], SamplingParams(max_new_tokens=3, ignore_eos=True))
    engine.step()
    engine.observer = recorder = Recorder()
    engine.step()
    engine.observer = None
    engine.step()
    assert [step.phase for step in recorder.steps] == ["decode"]


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_a_step_is_prepared_before_it_begins(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first operation would else be charged with the batch and the plan."""
    recorder, engine = record(checkpoint, [[4, 5, 6]], num_new=1)
    num_steps = []
    plan = engine.runner.backend.plan
    monkeypatch.setattr(
        engine.runner.backend, "plan", lambda batch: num_steps.append(len(recorder.steps)) or plan(batch)
    )
    before = len(recorder.steps)
    engine.generate([[4, 5, 6]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert num_steps == [before, before + 1]
