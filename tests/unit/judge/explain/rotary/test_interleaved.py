"""Engines that keep q and k for rotary over neighbouring pairs, and embeddings that are scaled after their module."""

from harness.judge.explain.products.linear import INTERLEAVED


def test_rows_that_are_interleaved_on_purpose_are_told_their_way(bench_of):
    one, tap = bench_of("llama-tiny"), "model.layers.1.self_attn.k_proj"
    rows, size = one.tap(tap), one.hf.head_dim
    explanation = one.explain(tap, rows.unflatten(1, (-1, 2, size // 2)).transpose(2, 3).flatten(1))
    assert (explanation.cause, explanation.is_cause, explanation.num_fitted) == (INTERLEAVED, True, 0)
    assert "leave both out of names=" in explanation.detail


def test_an_embedding_without_its_scale_is_told_its_way(bench_of):
    one, tap = bench_of("gemma3-tiny"), "model.embed_tokens"
    explanation = one.explain(tap, one.tap(tap) / one.hf.config.hidden_size**0.5)
    assert explanation.cause.startswith("the embedding is not scaled")
    assert explanation.is_cause
    assert "leave the module out of names=; the input of the first layer is then the embedding" in explanation.detail
