"""Rows as sketches: what they tell of a distance, and goldens that keep them."""

import pytest
import torch

from harness.base.metrics import row_metrics
from harness.errors import Code, HarnessError
from harness.formats.values import open_source
from harness.oracle import sketch_rows as sketches
from harness.oracle.make_golden import cached_golden, make_golden, open_cached_golden
from harness.oracle.requests import Prompt
from harness.oracle.sketch import make_sketch
from harness.oracle.sketch_rows import estimated_metrics, sketch_rows, sketched_taps

PROMPTS = (Prompt(token_ids=(5, 9, 200, 17, 31, 8), max_new_tokens=4), Prompt(token_ids=(44, 3, 90), max_new_tokens=1))
WIDTH, NUM_ROWS = 2048, 400


def rows(seed=0):
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks():
    """Elements that are wrong: all, one head, one channel of each head, every second, two."""
    none = torch.zeros(WIDTH, dtype=torch.float64)
    head, channel, half, two = (none.clone() for _ in range(4))
    head[256:384], channel[5::128], half[::2] = 1, 1, 1
    two[[7, 1031]] = 1
    return {"all": none + 1, "head": head, "channel": channel, "half": half, "two": two}


@pytest.mark.parametrize("which", masks())
def test_a_distance_is_estimated_within_a_few_per_cent(which):
    expected = rows()
    mask = masks()[which]
    actual = expected + 1e-6 * (WIDTH / mask.sum()).sqrt() * rows(1) * mask
    whole, estimated = row_metrics(actual, expected), estimated_metrics(actual, sketch_rows(expected, torch.float64))
    share = estimated.relative_l2 / whole.relative_l2
    assert float(share.square().mean()) == pytest.approx(1, abs=0.05)
    assert float(share.std()) <= 1.2 * 0.5 * (2 / sketches.PROJECTIONS_A_ROW) ** 0.5
    torch.testing.assert_close(estimated.cosine, whole.cosine, rtol=0, atol=1e-11)
    assert estimated.is_estimated
    assert not whole.is_estimated


def test_a_distance_of_one_rounding_is_known_to_few_roundings():
    expected = rows()
    actual = expected.float()
    whole, estimated = row_metrics(actual, expected), estimated_metrics(actual, sketch_rows(expected, torch.float64))
    share = estimated.relative_l2 / whole.relative_l2
    assert 0.9 < float(share.min()) <= float(share.max()) < 2.5
    assert sketch_rows(expected, torch.float64).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_distances_are_known_up_to_the_largest_numbers_of_float32(dtype):
    expected, largest = rows().float(), 2.0**125
    actual = expected.double() * (1 + 1e-3 * rows(1))
    expected[: NUM_ROWS // 2] *= 1e-3
    near = estimated_metrics(actual, sketch_rows(expected, dtype))
    far = estimated_metrics((actual * largest).float(), sketch_rows(expected * largest, dtype))
    assert bool((expected * largest).isfinite().all())
    assert not bool((expected * largest).norm(dim=1).isfinite().all())
    torch.testing.assert_close(far.error_norm / largest, near.error_norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(far.relative_l2, near.relative_l2, rtol=1e-3, atol=0)


def test_equal_rows_have_equal_sketches_wherever_they_stand(monkeypatch):
    expected = rows()[:, :1000]
    stored = sketch_rows(expected, torch.float64)
    assert torch.equal(sketch_rows(expected[7:9], torch.float64), stored[7:9])
    monkeypatch.setattr(sketches, "_BLOCK_ELEMENTS", 3000)
    assert torch.equal(sketch_rows(expected, torch.float64), stored)
    assert not estimated_metrics(expected.view(NUM_ROWS, 10, 100), stored).error_norm.any()
    changed = expected.clone()
    changed[3, 999] += 1e-9
    assert estimated_metrics(changed, stored).error_norm.nonzero().tolist() == [[3]]


def test_what_is_not_finite_is_counted():
    actual = rows()
    actual[2, 5], actual[4, :2] = torch.nan, torch.inf
    metrics = estimated_metrics(actual, sketch_rows(rows(), torch.float64))
    assert (~metrics.is_finite).nonzero()[:, 0].tolist() == [2, 4]
    assert (metrics.num_nan, metrics.num_inf) == (1, 2)


@pytest.fixture
def narrow(monkeypatch, tmp_path):
    """Let all rows of tiny models be wide: a sketch has fewer projections than they have elements."""
    monkeypatch.setattr(sketches, "PROJECTIONS_A_ROW", 24)
    monkeypatch.setattr(sketches, "_LEAST_WIDTH", 0)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    sketches._directions.cache_clear()
    yield
    sketches._directions.cache_clear()


@pytest.fixture
def both(load, tmp_path, narrow):
    """A model, its golden with all values, and that of the cache."""
    hf = load("qwen3-tiny")
    return hf, make_golden(hf, PROMPTS, tmp_path / "whole"), cached_golden(hf, PROMPTS)


def test_a_cached_golden_keeps_sketches_where_a_distance_is_enough(both):
    hf, whole, cached = both
    assert not whole.sketched
    assert set(cached.sketched) == sketched_taps(hf.graph)
    shapes = {entry.name: tuple(entry.shape) for entry in whole.recording.taps}
    assert cached.sketched == {tap: shapes[tap] for tap in cached.sketched}
    assert cached.noise.keys() == whole.noise.keys()
    (ours,), (theirs,) = cached.recording.steps[:1], whole.recording.steps[:1]
    assert torch.equal(ours.tap(hf.graph.logits), theirs.tap(hf.graph.logits)), "compared element by element"
    assert hf.graph.logits not in cached.sketched


def test_taps_that_are_asked_for_are_kept_whole(both, tmp_path):
    hf, whole, cached = both
    tap = "model.layers.0.k_rope"
    assert tap in cached.sketched
    golden = make_golden(hf, PROMPTS, tmp_path / "some", keeps_values=False, whole={tap})
    assert golden.sketched.keys() == cached.sketched.keys() - {tap}
    assert torch.equal(golden.recording.steps[0].tap(tap), whole.recording.steps[0].tap(tap))


def test_sketches_are_not_shown_as_values(both):
    hf, whole, cached = both
    tap = next(iter(cached.sketched))
    with pytest.raises(HarnessError, match=r"holds sketches of .*, and no values"):
        open_source(cached.recording.path).tensor(tap)
    assert open_source(whole.recording.path).tensor(tap).shape[1:] == cached.sketched[tap]
    assert open_source(cached.recording.path).tensor(hf.graph.logits).dim() == 2


@pytest.mark.parametrize("text", ["", "[" * 5000, "7", '{"sketched": 7}', '{"sketched": [[]]}'])
def test_a_damaged_golden_is_refused_before_it_is_shown(both, text):
    _, _, cached = both
    (cached.recording.path / "golden.json").write_text(text)
    with pytest.raises(HarnessError, match="the golden is damaged") as caught:
        open_source(cached.recording.path)
    assert caught.value.code is Code.BAD_MANIFEST


def test_the_case_sketch_is_the_same_of_both(both):
    _, whole, cached = both
    ours, theirs = make_sketch(cached), make_sketch(whole)
    assert ours.requests == theirs.requests
    for tap, figures in theirs.taps.items():
        assert ours.taps[tap].figures == pytest.approx(figures.figures, rel=1e-9, abs=1e-9)


def test_values_that_are_asked_for_are_beside_the_sketches_and_serve_both(both):
    hf, whole, cached = both
    assert cached_golden(hf, PROMPTS).recording.path == cached.recording.path
    with_values = cached_golden(hf, PROMPTS, keeps_values=True)
    assert not with_values.sketched
    assert with_values.recording.bits == whole.recording.bits
    assert cached_golden(hf, PROMPTS).recording.path == with_values.recording.path


def test_without_wide_rows_one_golden_serves_both(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    first = cached_golden(load("llama-tiny"), PROMPTS)
    assert not first.sketched
    assert cached_golden(load("llama-tiny"), PROMPTS, keeps_values=True).recording.path == first.recording.path


def test_the_golden_of_the_cache_has_the_graph(both):
    hf, _, cached = both
    opened = open_cached_golden(hf, PROMPTS)
    assert opened.graph == hf.graph
    assert opened.recording.path == cached.recording.path
    assert open_cached_golden(hf, PROMPTS[:1]) is None
    (cached.recording.path / "noise.safetensors").unlink()
    assert open_cached_golden(hf, PROMPTS) is None
