"""What a live engine's cache holds is read back where it shows it."""

from types import SimpleNamespace

import pytest
import torch

import harness
from harness.engines.by_content.columns import Columns
from harness.engines.by_content.forwards import RowTeller
from harness.engines.by_content.kept import KeptCache
from harness.engines.by_content.steps import Site
from harness.engines.by_content.tap_map import MappedTap, ShownSite, StepBatch, TapEvidence, TapMap
from harness.formats.taps import Graph, Kind, Operation

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]
K_CACHE = "model.layers.1.k_cache"


@pytest.fixture
def engine(fused_engine, fused):
    """Return the toy with a method `cached`."""
    toy = fused_engine()

    def cached(request):
        slots = torch.tensor(toy.slots[request])
        at = slots // fused.BLOCK, slice(None), slice(None), slots % fused.BLOCK
        return {
            layer: tuple(item.attn.cache[part][at] for part in (0, 1)) for layer, item in enumerate(toy.model.layers)
        }

    toy.cached = cached
    return toy


def check(engine, checkpoints, **options):
    return harness.check(engine, model=checkpoints / "qwen2-tiny", prompts=PROMPTS, max_new_tokens=4, **options)


@pytest.mark.slow
def test_a_sound_cache_passes_in_every_schedule(engine, checkpoints):
    for run in check(engine, checkpoints, schedules=["plain", "chunked:3", "batched", "mixed:4"]).runs:
        assert run.findings == ()
        assert run.coverage.not_offered == ()
        assert run.coverage.missing == 0


@pytest.mark.slow
def test_a_cache_of_less_digits_is_named(engine, checkpoints):
    attention = engine.model.layers[1].attn
    store = attention.store
    attention.store = lambda part, rows, slots: store(part, rows.half().float() if part == 0 else rows, slots)
    (run,) = check(engine, checkpoints, schedules=["plain"]).runs
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == (K_CACHE, 0, 0)
    assert "lower dtype: float16" in first.explanation.cause


def test_the_layers_that_are_not_shown_are_said(engine, checkpoints):
    cached = engine.cached
    engine.cached = lambda request: {layer: item for layer, item in cached(request).items() if layer != 1}
    (run,) = check(engine, checkpoints, schedules=["plain"]).runs
    assert run.findings == ()
    assert set(run.coverage.not_offered) == {K_CACHE, "model.layers.1.v_cache"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("wrong", "actual"),
    [
        (lambda x: x[..., :-1], r"\[3, 2, 31\]"),
        (lambda x: torch.cat([x, x]), r"\[6, 2, 32\]"),
        (torch.Tensor.tolist, "list"),
    ],
)
def test_what_is_no_cache_of_the_model_is_refused(engine, checkpoints, wrong, actual):
    cached = engine.cached
    engine.cached = lambda request: {layer: (wrong(k), v) for layer, (k, v) in cached(request).items()}
    with pytest.raises(harness.HarnessError, match=rf"(?s)layers.0.k_cache.*cached\(request\).*up to 3.*{actual}"):
        check(engine, checkpoints, schedules=["plain"])


def test_keys_of_another_order_are_put_in_that_of_hf():
    keys, values, shape = "model.layers.0.k_rope", "model.layers.0.self_attn.v_proj", (1, 4)
    graph = Graph(
        (
            Operation(tap=keys, kind=Kind.ROTARY, shape=shape),
            Operation(tap=values, kind=Kind.LINEAR, shape=shape),
            Operation(tap="model.layers.0.k_cache", kind=Kind.CACHE, inputs=(keys,), shape=shape),
            Operation(tap="model.layers.0.v_cache", kind=Kind.CACHE, inputs=(values,), shape=shape),
        )
    )
    columns = Columns(start=8, stop=12, order=(8, 10, 9, 11))
    source = ShownSite(site=Site("rotary", 0, "x"), columns=columns)
    mapped = MappedTap(tap=keys, evidence=TapEvidence.CONTENT, sources=(source,))
    rows = torch.arange(12.0).reshape(3, 1, 4)
    engine = SimpleNamespace(cached=lambda _request: {0: (rows, rows)})
    taps = TapMap(taps={keys: mapped}, uncertain={}, teller=RowTeller(()), batch=StepBatch.MIXED, num_tensors=1)
    held = KeptCache(engine, graph, taps).read(0, 5)
    kept, kept_rows = held["model.layers.0.k_cache"]
    assert kept == range(2, 5)
    assert torch.equal(kept_rows, rows[..., [0, 2, 1, 3]])
    assert torch.equal(held["model.layers.0.v_cache"][1], rows)
