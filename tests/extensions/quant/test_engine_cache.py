"""The cost of an engine's cache: the format and the arithmetic, in prompts and in decode."""

import pytest
import torch

from harness.base.progress import no_progress
from harness.engines import open_engine
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.quant.run import measure_types
from harness.oracle.model import load_model
from harness.plan import plan_engine
from reference_engine.kv_cache import KVCache

OPTIONS = {"kv_cache_dtype": "float8_e5m2"}


@pytest.fixture(scope="module")
def hf(checkpoints):
    return load_model(checkpoints / "qwen3-tiny", dtype=torch.float32, stays=True)


@pytest.fixture
def cost(hf):
    ids = torch.randint(3, 250, (2, 21), generator=torch.Generator().manual_seed(5)).tolist()

    def measure(**plan):
        planned = plan_engine(model=str(hf.folder), dtype="float32", **plan)
        arguments = {"model": "", "text": "", "options": LlamaCppOptions(), "seed": 0, "progress": no_progress}
        return measure_types(hf, [], ids, engine=planned, **arguments).types[0]

    return measure


def test_what_is_not_the_format_is_arithmetic(cost):
    row = cost(engine_options=OPTIONS)
    assert [(phase.phase, phase.num_rows) for phase in row.phases] == [("prefill", 20), ("decode", 22)]
    for phase in row.phases:
        assert phase.kl_mean_arithmetic < 1e-5 * phase.kl_mean_format
        assert phase.kl_mean == pytest.approx(phase.kl_mean_format, rel=1e-2)
    assert (row.bits_per_weight, row.kl_mean_format > 0) == (8, True)


def test_a_mistake_in_decode_is_arithmetic_there(cost, monkeypatch):
    read = KVCache._as_read

    def wrong(self, layer, part, x):
        num_slots = x.shape[:-2].numel()  # one block of 16 in the prompt, two at the end
        return read(self, layer, part, x) * (1.05 if num_slots > 16 else 1.0)

    monkeypatch.setattr(KVCache, "_as_read", wrong)
    prefill, decode = cost(engine_options=OPTIONS).phases
    assert prefill.kl_mean_arithmetic < 1e-5 * prefill.kl_mean_format
    assert decode.kl_mean_arithmetic > 1e-2 * decode.kl_mean_format


def test_a_cache_in_the_dtype_of_the_engine_has_no_format(cost):
    row = cost()
    assert (row.name, row.kl_mean_format, row.bits_per_weight) == ("cache float32 of reference", 0, 32)


class OfSampledRows:
    """Shows the rows of sampled tokens alone."""

    def __init__(self, engine):
        self.name, self.capabilities, self._engine = engine.name, engine.capabilities, engine

    def run(self, workload, writer):
        tap = writer.tap
        writer.tap = lambda name, rows: None if name == "model.norm" else tap(name, rows)
        self._engine.run(workload, writer)


def test_what_the_head_reads_must_be_recorded(cost, hf):
    engine = OfSampledRows(open_engine("reference", hf.folder, dtype="float32", device="cpu", options={}))
    with pytest.raises(HarnessError, match=r"has not recorded model\.norm at every row") as caught:
        cost(subject=engine)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
