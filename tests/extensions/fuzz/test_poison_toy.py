"""A live engine without an adapter lets its memory be poisoned: two methods, and rows of padding where it embeds."""

import pytest
import torch

from harness.engines.by_content import StepEngine
from harness.engines.poison import fill
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.fuzz.poison import Poisoner
from harness.formats.schedule import parse_schedule
from harness.oracle.model import load_model
from harness.plan import plan_engine
from harness.results.check import Memory

from .planted_leaks import FINITE, NOT_FINITE, REQUESTS, VICTIM


@pytest.fixture(scope="module")
def poisoned(fused, checkpoints):
    """Return what poisons the toy under a schedule, and returns the poisoner; its map is learned once."""
    folder = checkpoints / "qwen2-tiny"

    class Toy(fused.FusedEngine):
        def fill_unused(self, value):
            is_used = torch.zeros(64 * fused.BLOCK, dtype=torch.bool)
            is_used[[slot for slots in self.slots.values() for slot in slots]] = True
            return self._fill((~is_used).nonzero()[:, 0], value)

        def fill_states(self, request, value):
            return self._fill(torch.tensor(self.slots[request]), value)

        def _fill(self, slots, value):
            for layer in self.model.layers:
                layer.attn.cache[:, slots // fused.BLOCK, :, :, slots % fused.BLOCK] = value
            return len(slots) * fill(torch.empty(2, len(self.model.layers), *layer.attn.shape), value)

    graph = load_model(folder, dtype=torch.float32).graph
    engine = StepEngine(lambda: Toy(folder), name="toy", folder=folder, dtype="float32")
    engine.match_taps(graph)

    def run(planted):
        plan = plan_engine(model=str(folder), dtype="float32")
        poisoner = Poisoner(
            plan=plan, engine=engine, graph=graph, pool=None, progress=None, limit_s=60.0, planted=planted
        )
        poisoner.poison(parse_schedule("batched"), REQUESTS, victim=VICTIM)
        assert poisoner.failures == []
        filled = {memory.memory for memory in poisoner.memories() if memory.num_filled}
        assert filled == {Memory.UNUSED, Memory.PADDING, Memory.OTHERS}  # it leaves nothing unset
        return poisoner.leaks

    return run


def before_the_norm(change):
    """Change the rows that the first norm of a layer is given."""
    return lambda fused: replacing((fused.RMSNorm, "_norm", lambda norm, self, x: norm(self, change(x))))


def _as_the_first(attend, self, q, k, v, batch):
    """The key of a padded row is written to the slot of the step's first row."""
    slots = batch["slots"].clone()
    slots[-1] = slots[0]
    return attend(self, q, k, v, {**batch, "slots": slots})


def _whole_blocks(attend, self, q, k, v, batch):
    """Keys behind a request's end are read and masked."""
    tables = [[*table, *range(table[-1] + 1, -(-(table[-1] + 1) // 4) * 4)] for table in batch["tables"]]
    return attend(self, q, k, v, {**batch, "tables": tables})


def _without_padding(x):
    """Legitimate: the last row is replaced before the others see it."""
    is_real = torch.arange(len(x))[:, None] < len(x) - 1
    return x + torch.where(is_real, x, 0.0)[-1]


@pytest.mark.slow
def test_padding_that_is_computed_and_thrown_away_is_no_finding(poisoned, fused):
    assert poisoned(lambda: replacing()()) == ()
    assert poisoned(before_the_norm(_without_padding)(fused)) == ()


LEAKS = [
    (
        before_the_norm(lambda x: x + 0.0 * x.mean()),
        Memory.PADDING, "model.layers.0.input_layernorm", (0, 0), NOT_FINITE,
    ),
    (
        before_the_norm(lambda x: x * (1 + x.abs().amax().clamp(max=1e3))),
        Memory.PADDING, "model.layers.0.input_layernorm", (0, 0), FINITE,
    ),
    (
        lambda fused: replacing((fused.Attention, "forward", _as_the_first)),
        Memory.PADDING, "model.layers.0.attention", (0, 0), FINITE,
    ),
    (
        lambda fused: replacing((fused.Attention, "forward", _whole_blocks)),
        Memory.UNUSED, "model.layers.0.attention", (0, 0), NOT_FINITE,
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "memory", "tap", "row", "values"), LEAKS)
def test_what_padding_and_unused_slots_reach_is_named(poisoned, fused, plant, memory, tap, row, values):
    first = poisoned(plant(fused))[0]
    assert (first.memory, first.tap, (first.request, first.position), first.values) == (memory, tap, row, values)
