"""Attention over other tensors than its own, or coarser ones, against sums that are written out key by key."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.judge.explain.attention import reads
from harness.judge.explain.cache.formats import declared_format
from harness.judge.explain.core.formats import cut_off

from ..toy_attention import KEY, PLACES, RAW, VALUE, H, K, N, Toy, step_of
from ..toys import by_cause, named, random

OTHERS = {layer: (f"model.layers.{layer}.k_rope", f"model.layers.{layer}.self_attn.v_proj") for layer in (0, 2)}


def reading(toy, key, value, is_read=lambda place, at: True):
    """Rows that read `key` and `value` of each place where `is_read` holds, and its own elsewhere."""
    right = toy.tensors

    def row(place):
        return toy.context(
            place,
            key=lambda at: key(at) if is_read(place, at) else right[KEY][at],
            value=lambda at: value(at) if is_read(place, at) else right[VALUE][at],
        )

    return toy.contexts(PLACES, row)


def earlier(place, at):
    return step_of(at) < step_of(place)


EXTENTS = {"for tokens of every step": lambda place, at: True, "for tokens of earlier steps": earlier}


def test_values_that_are_narrower_than_keys(tmp_path):
    """Those of latent attention: keys and values cannot stand for each other, the cache of another layer can."""
    latent = Toy(tmp_path / "r", value_size=3)
    hypotheses = {(h.cause, h.detail): h.output for h in reads.other_tensors(latent.failure())}
    causes = {"keys are cached before rotary", *(f"reads the cache of layer {layer}" for layer in OTHERS)}
    assert set(hypotheses) == {(cause, extent) for cause in causes for extent in EXTENTS}
    key, value = (latent.tensors[tap].__getitem__ for tap in OTHERS[2])
    torch.testing.assert_close(
        hypotheses["reads the cache of layer 2", "for tokens of earlier steps"], reading(latent, key, value, earlier)
    )


TENSORS = {
    "K and V are swapped in the cache": (VALUE, KEY),
    "values are read from the K cache": (KEY, KEY),
    "keys are read from the V cache": (VALUE, VALUE),
    "keys are cached before rotary": (RAW, VALUE),
    **{f"reads the cache of layer {layer}": taps for layer, taps in OTHERS.items()},
}


def test_other_tensors(toy):
    tensors = {tap: values.__getitem__ for tap, values in toy.tensors.items()}
    hypotheses = {(h.cause, h.detail): h.output for h in reads.other_tensors(toy.failure())}
    assert set(hypotheses) == {(cause, extent) for cause in TENSORS for extent in EXTENTS}
    for (cause, extent), output in hypotheses.items():
        key, value = (tensors[tap] for tap in TENSORS[cause])
        torch.testing.assert_close(output, reading(toy, key, value, EXTENTS[extent]), msg=f"{cause}, {extent}")


@pytest.mark.parametrize("cause", TENSORS)
def test_other_tensors_are_named(toy, cause):
    key, value = (toy.tensors[tap].__getitem__ for tap in TENSORS[cause])
    assert named(toy.failure(reading(toy, key, value))).cause == cause


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_coarser_dtypes(toy, dtype):
    name = f"in a lower dtype: {str(dtype).removeprefix('torch.')}"
    hypotheses = [h for h in reads.coarse_cache(toy.failure()) if h.cause.endswith(f"cache is {name}")]

    def low(tap):
        return lambda at: toy.tensors[tap][at].to(dtype).double()

    right = {tap: toy.tensors[tap].__getitem__ for tap in (KEY, VALUE)}
    expected = [
        (f"the {which} cache is {name}", reading(toy, key, value, is_read))
        for is_read in EXTENTS.values()
        for which, key, value in (
            ("KV", low(KEY), low(VALUE)), ("K", low(KEY), right[VALUE]), ("V", right[KEY], low(VALUE)),
        )
    ]  # fmt: skip
    assert [item.cause for item in hypotheses] == [cause for cause, _ in expected]
    for item, (cause, output) in zip(hypotheses, expected, strict=True):
        torch.testing.assert_close(item.output, output, msg=cause)


def test_what_the_cache_gives_back(tmp_path, toy):
    assert by_cause(reads.read_back, toy.failure()) == {}, "it was not read back"
    read = {f"model.layers.1.{name}_cache": {place: random(K, H, seed=700 + 50 * at + number)
                                             for number, place in enumerate(PLACES)}
            for at, name in enumerate("kv")}  # fmt: skip
    back = Toy(tmp_path / "r", readback=read)
    (hypothesis,) = by_cause(reads.read_back, back.failure()).values()
    assert hypothesis.cause == "reads what the cache gives back, which is not what was written: see k_cache and v_cache"
    assert hypothesis.is_vague
    keys, values = (read[f"model.layers.1.{name}_cache"].__getitem__ for name in "kv")
    torch.testing.assert_close(hypothesis.output, reading(back, keys, values))


def test_a_cache_of_which_one_place_was_not_read_back_says_nothing(tmp_path):
    read = {f"model.layers.1.{name}_cache": {place: random(K, H) for place in PLACES[1:]} for name in "kv"}
    assert by_cause(reads.read_back, Toy(tmp_path / "r", readback=read).failure()) == {}


@pytest.mark.parametrize(
    ("omitted", "cause"),
    [
        (RAW, "keys are cached before rotary"),
        (OTHERS[0][0], "reads the cache of layer 0"),
        (OTHERS[2][1], "reads the cache of layer 2"),
    ],
)
def test_a_tensor_that_was_not_recorded_cannot_be_told(tmp_path, toy, omitted, cause):
    hypotheses = by_cause(reads.other_tensors, Toy(tmp_path / "r", omitted=(omitted,)).failure())
    assert set(hypotheses) == set(by_cause(reads.other_tensors, toy.failure())) - {cause}


def test_a_declared_cache_that_is_cut_off(toy):
    """As in vLLM's float8 cache on a CPU."""
    failure = toy.failure()

    def declaring(**numerics):
        manifest = SimpleNamespace(numerics=Numerics(**numerics))
        return replace(failure, recording=SimpleNamespace(manifest=manifest))

    def low(tap):
        return lambda at: cut_off(toy.tensors[tap][at], torch.float8_e4m3fn)

    hypotheses, *_ = declared_format(declaring(cache="float8_e4m3fn"))
    assert (
        hypotheses.cause == "keys and values are cut off to float8_e4m3fn, the dtype of the cache, instead of rounded"
    )
    torch.testing.assert_close(hypotheses.output, reading(toy, low(KEY), low(VALUE), lambda place, at: True))
    assert not list(declared_format(declaring()))
    assert not list(declared_format(declaring(cache="Q8_0")))


def test_scales_of_a_declared_cache(toy):
    """The scale of the values is that of the layer before; the others' names are of other mistakes."""
    failure = toy.failure()
    scales = {f"model.layers.{layer}.{part}_cache": (0.01 * (layer + 1),) for layer in (0, 1) for part in "kv"}
    numerics = Numerics(cache="int8", cache_scales=scales | {"model.layers.1.v_cache": (0.05,)})
    declaring = replace(failure, recording=SimpleNamespace(manifest=SimpleNamespace(numerics=numerics)))
    hypotheses = {item.cause: item.output for item in declared_format(declaring)}

    def kept(tap, scale):
        return lambda at: (toy.tensors[tap][at] / scale).round().clamp(-128, 127) * scale

    expected = reading(toy, kept(KEY, 0.02), kept(VALUE, 0.01), lambda place, at: True)
    torch.testing.assert_close(hypotheses["values have the scale of model.layers.0"], expected)
    expected = reading(toy, kept(KEY, 1.0), kept(VALUE, 0.05), lambda place, at: True)
    torch.testing.assert_close(hypotheses["keys have a scale of 1: theirs is not delivered"], expected)
    assert len({item.sum() for item in hypotheses.values()}) > 12


def test_float8_cut_off():
    values = torch.tensor([3.9575, -0.9820, 5.6862, 1.2474], dtype=torch.float64)
    assert cut_off(values, torch.float8_e4m3fn).tolist() == [3.75, -0.9375, 5.5, 1.125]


KV_HEADS = [0, 0, 0, 1, 1, 1]
WRONG, VALUES, KEYS = (
    "query heads read the wrong KV heads",
    "query heads read the values of the wrong KV heads, and the right keys",
    "query heads read the keys of the wrong KV heads, and the right values",
)


@pytest.mark.parametrize("wrong_heads", [[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1]])
@pytest.mark.parametrize(("cause", "is_key", "is_value"), [(WRONG, 1, 1), (VALUES, 0, 1), (KEYS, 1, 0)])
def test_what_is_read_of_other_heads(toy, wrong_heads, cause, is_key, is_value):
    keys, values = wrong_heads if is_key else KV_HEADS, wrong_heads if is_value else KV_HEADS
    failure = toy.failure(lambda place: toy.context(place, heads=keys, value_heads=values))
    is_tiled = wrong_heads == [0, 1, 0, 1, 0, 1]
    name = "KV heads are tiled instead of repeated" if is_tiled and cause == WRONG else cause
    hypothesis = by_cause(reads.other_kv_heads, failure)[name]
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.detail == f"KV head of each query head: {wrong_heads}"
    assert hypothesis.num_fitted == (0 if is_tiled else 6)


def test_a_context_that_is_laid_out_by_element(toy):
    rows = toy.contexts(PLACES)
    by_element = torch.stack([torch.stack([row[at::4] for at in range(4)]).flatten() for row in rows])
    hypotheses = by_cause(reads.other_layout, toy.failure())
    torch.testing.assert_close(hypotheses["the context is laid out by element, then by head"].output, by_element)


def test_a_context_that_is_reshaped_without_transposing(toy):
    def row(place):
        step = [another for another in PLACES if another[0] == place[0] and step_of(another) == step_of(place)]
        of_heads = [toy.context(another)[4 * head : 4 * head + 4] for head in range(N) for another in step]
        at = step.index(place)
        return torch.cat(of_heads[N * at : N * at + N])

    hypotheses = by_cause(reads.other_layout, toy.failure())
    cause = "the context is reshaped without transposing heads and tokens"
    torch.testing.assert_close(hypotheses[cause].output, toy.contexts(PLACES, row))


def test_heads_that_read_their_own(toy):
    assert by_cause(reads.other_kv_heads, toy.failure()) == {}


def test_one_kv_head_has_no_other(toy, monkeypatch):
    failure = toy.failure(lambda place: toy.context(place, heads=[1, 0, 0, 1, 1, 1]))
    monkeypatch.setattr(reads, "_MOST", 1)
    assert by_cause(reads.other_kv_heads, failure) == {}
    monkeypatch.setattr(reads, "_MOST", 2)
    assert by_cause(reads.other_kv_heads, failure)


def test_the_nearest_head_over_all_rows_counts(toy):
    """One row that is far off in another way does not decide."""
    another = [1, 0, 0, 1, 1, 1]
    actual = toy.contexts(PLACES, lambda place: toy.context(place, heads=another))
    actual[3] += 0.5
    hypothesis = by_cause(reads.other_kv_heads, toy.failure(actual))[WRONG]
    assert hypothesis.detail.endswith(str(another))


def test_a_chunk_that_clears_its_page(toy):
    """Requests 0 and 1 have a chunk from positions 4 and 1 on; pages of 4 begin at the former."""
    zero = torch.zeros(K, H, dtype=torch.float64)

    def lost(rows_lost):
        return reading(
            toy, lambda _: zero, lambda _: zero, lambda place, at: at in rows_lost and step_of(place) > step_of(at)
        )

    hypotheses = {item.detail: item.output for item in reads.cleared_pages(toy.failure())}
    of_later, of_own = (
        lambda size, which=which: f"pages of {size}, chunks: {which} read zeros where earlier steps wrote"
        for which in ("later rows", "its own rows")
    )
    torch.testing.assert_close(hypotheses[of_later(4)], lost({(1, 0)}))
    torch.testing.assert_close(hypotheses[of_later(8)], lost({(1, 0), *((0, at) for at in range(4))}))
    assert not torch.equal(hypotheses[of_own(4)], hypotheses[of_later(4)])
    assert len(hypotheses) == 24
