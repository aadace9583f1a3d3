import torch

from harness.errors import Code

from ..conftest import BLOCK_SIZE

TAP, WRITTEN = "model.layers.1.k_cache", "model.layers.1.k_rope"


def explain(bench, tensor, tap=TAP):
    return bench.explain(tap, tensor, code=Code.CACHE_DIFFERS)


def written(bench, tap=WRITTEN):
    """A tap at the rows that are read back."""
    rows, read = bench.rows(), bench.rows(TAP)
    where = {(r, p): at for at, (r, p) in enumerate(zip(rows.request.tolist(), rows.position.tolist(), strict=True))}
    return bench.tap(tap)[[where[at] for at in zip(read.request.tolist(), read.position.tolist(), strict=True)]]


def test_whole_tensors(bench):
    bench = bench()
    right = bench.tap(TAP)
    assert torch.equal(right, written(bench))
    wrong = {
        "the cache is in a lower dtype: bfloat16": right.bfloat16().double(),
        "the cache is in a lower dtype: float8_e4m3fn": right.to(torch.float8_e4m3fn).double(),
        "K and V are written to each other's cache": written(bench, "model.layers.1.self_attn.v_proj"),
        "keys are cached before rotary": written(bench, "model.layers.1.self_attn.k_norm"),
        "the cache holds what layer 0 wrote": written(bench, "model.layers.0.k_rope"),
        "never written: zeros come back": torch.zeros_like(right),
    }
    for cause, tensor in wrong.items():
        found = explain(bench, tensor)
        assert (found.cause, found.residual_after) == (cause, 0)
        assert found.scope.startswith("every row")


def test_another_row_and_where_it_came_from(bench):
    bench = bench()
    rows, wrong = bench.rows(TAP), bench.tap(TAP)
    at = {(r, p): i for i, (r, p) in enumerate(zip(rows.request.tolist(), rows.position.tolist(), strict=True))}
    wrong[at[0, 20]] = wrong[at[1, 5]]
    found = explain(bench, wrong)
    assert found.cause == "the slot holds what another request wrote: shared, freed or given out wrongly"
    assert found.detail == "written last, by position: 20: request 1, position 5, step 0"
    place = found.provenance
    assert (place.request, place.position, place.holds) == (0, 20, "the key of request 1, position 5")
    assert place.slot == place.block * BLOCK_SIZE + 20 % BLOCK_SIZE
    assert (place.writer_request, place.writer_step) == (0, 0)  # as the engine says; the content says otherwise


def test_the_first_slots_of_blocks(bench):
    bench = bench()
    rows, wrong = bench.rows(TAP), bench.tap(TAP)
    boundary = (rows.position % BLOCK_SIZE == 0) & (rows.position > 0)
    wrong[boundary] = 0
    found = explain(bench, wrong)
    assert found.cause == "never written: zeros come back, at a block boundary (slot mapping)"
    assert found.scope == "rows at every 8th position from 8 on"
    generator = torch.Generator().manual_seed(0)
    wrong[boundary] = torch.randn(wrong[boundary].shape, generator=generator, dtype=torch.float64)
    found = explain(bench, wrong)
    assert found.cause == "the slot holds what no recorded row has, at a block boundary (slot mapping)"
    assert not found.is_cause  # it was written, by the engine's own record
    assert found.provenance.holds == "content that no recorded row has"


def test_the_token_beside_it(bench):
    bench = bench()
    rows, wrong = bench.rows(TAP), bench.tap(TAP)
    own = (rows.request == 0) & (rows.position < 30) & (rows.position > 2)
    wrong[own] = written(bench)[own].roll(-1, dims=0)
    wrong[(rows.request == 0) & (rows.position == 29)] = written(bench)[(rows.request == 0) & (rows.position == 30)]
    found = explain(bench, wrong)
    assert found.cause == "the slot holds the token +1 positions away: written to a wrong slot"


def test_memory_that_is_not_finite(bench):
    bench = bench()
    wrong = bench.tap(TAP)
    wrong[bench.rows(TAP).position == 16] = torch.nan
    found = explain(bench, wrong)
    assert found.cause == "the slot holds what no recorded row has, at a block boundary (slot mapping)"
    begins = "the first bad row is at position 16 of request 0, where block 2 begins"
    assert found.detail == f"NaN throughout, as memory that was never written may; {begins}"
    assert not found.is_cause
