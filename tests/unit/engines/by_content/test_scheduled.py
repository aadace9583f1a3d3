"""An engine that runs its own scheduler is recorded by a map: its rows, its tokens, its cache, and its mistakes."""

from functools import partial

import pytest
import torch
from torch import nn

import harness
from harness.engines import Capabilities
from harness.engines.by_content.scheduled import ForwardBatch, StepWatcher, learn_taps
from harness.engines.paged_cache import PagedCache
from harness.errors import Code, HarnessError

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]
CHUNK = 4


class Scheduler:
    """Runs the toy's requests: prompts in chunks beside the others' decode, and the sampler's choice after them."""

    def __init__(self, engine, chunk):
        self.engine, self.chunk, self.sampler = engine, chunk, nn.Module()
        self.sampler.forward = lambda logits: logits.div_(2).argmax(dim=-1)
        self.waiting, self.ends, self.work = {}, {}, []

    def add(self, request, prompt, num_new):
        self.waiting[request], self.ends[request] = (0, list(prompt)), len(prompt) + num_new - 1

    def step(self):
        self.work = [(request, tokens[: self.chunk], first) for request, (first, tokens) in self.waiting.items()]
        chosen = self.sampler(self.engine.step(self.work)).tolist()
        for (request, computed, first), token in zip(self.work, chosen, strict=True):
            rest, stop = self.waiting.pop(request)[1][len(computed) :], first + len(computed)
            if rest or stop < self.ends[request]:
                self.waiting[request] = stop, rest or [token]


class Watcher(StepWatcher):
    scheduler = None

    def read_batch(self, _arguments):
        work, starts = self.scheduler.work, [0]
        for _, tokens, _ in work:
            starts.append(starts[-1] + len(tokens))
        return ForwardBatch(
            requests=[request for request, _, _ in work],
            starts=starts,
            positions=[first + at for _, tokens, first in work for at in range(len(tokens))],
            slot_mapping=torch.tensor([self.engine.slots[r][f + at] for r, t, f in work for at in range(len(t))]),
            block_tables={"": {request: self.engine.slots[request] for request, _, _ in work}},
        )

    def logits(self, arguments, _named):
        return arguments[0]

    def sampled_tokens(self, output):
        return output


class Engine:
    name = "scheduled"
    capabilities = Capabilities(schedules=("plain", "chunked", "batched"))

    def __init__(self, toy, folder, wrong=lambda tokens: tokens):
        self.toy, self.folder, self.wrong = toy, folder, wrong

    def match_taps(self, graph):
        self.graph, self.taps = graph, learn_taps(self.toy, self.folder, graph, "float32")

    def run(self, workload, writer):
        scheduler = Scheduler(self.toy, CHUNK if workload.schedule.chunk_size else 64)
        caches = list(self.caches())
        watcher = Watcher(
            self.toy.model, scheduler.sampler, self.taps, self.graph, workload.all_requests, writer, caches=caches
        )
        watcher.scheduler, watcher.engine = scheduler, self.toy
        with watcher:
            for batch in workload.batches:
                for request in batch:
                    self.toy.slots.pop(request.id, None)
                    prompt = self.wrong(list(request.token_ids[: request.prompt_length]))
                    scheduler.add(request.id, prompt, len(request.token_ids) - request.prompt_length + 1)
                while scheduler.waiting:
                    scheduler.step()

    def caches(self):
        for at, layer in enumerate(self.toy.model.layers):
            for part, name in enumerate(("k_cache", "v_cache")):
                yield PagedCache(
                    tap=f"model.layers.{at}.{name}", tensor=layer.attn.cache[part],
                    write=partial(layer.attn.store, part), num_slots=4096, block_size=1, row_shape=layer.attn.shape,
                )  # fmt: skip


def check(engine, schedules=("plain",)):
    return harness.check(engine, model=engine.folder, prompts=PROMPTS, max_new_tokens=4, schedules=schedules)


def test_every_tap_and_the_cache_pass_under_the_schedules_of_its_own(fused_engine, checkpoints):
    engine = Engine(fused_engine(), checkpoints / "qwen2-tiny")
    for run in check(engine, ["chunked:4", "batched"]).runs:
        assert run.findings == ()
        assert (run.coverage.missing, run.coverage.not_offered) == (0, ())
        assert {tap.judged_by for tap in run.taps} <= {"local", "cache"}
    assert "forward" not in vars(engine.toy.model)


def test_a_mistake_in_decode_is_found_at_its_operation(fused_engine, fused, checkpoints):
    """In decode, positions are one too high."""
    engine = Engine(fused_engine(), checkpoints / "qwen2-tiny")
    rotary, forward = engine.toy.model.layers[0].rotary, fused.Rotary.forward
    rotary.forward = lambda positions, q, k: forward(
        rotary, positions + (len(positions) == 2), q, k
    )  # with a padded row
    first = check(engine).runs[0].first_divergence
    assert (first.tap, first.phase) == ("model.layers.0.q_rope", "decode")
    assert "position off by one (+1)" in first.explanation.cause


def test_other_tokens_than_those_that_are_forced(fused_engine, checkpoints):
    engine = Engine(fused_engine(), checkpoints / "qwen2-tiny", wrong=lambda tokens: [*tokens[:2], 7, *tokens[3:]])
    with pytest.raises(HarnessError, match="fed other tokens than those that are forced") as caught:
        check(engine)
    assert caught.value.code is Code.ENGINE_FAILED
    assert "row 2 of a step of 9" in str(caught.value)


BATCH = {
    "requests": [7, 8], "starts": [0, 3, 4], "positions": [2, 3, 4, 0], "slot_mapping": torch.arange(4),
    "block_tables": {"0": {7: [5, 6, 0, 0], 8: [9, 0, 0, 0]}},
}  # fmt: skip


def test_padded_rows_of_block_tables_are_cut_behind_the_last_row():
    assert ForwardBatch(**BATCH, block_size=4).tables_in_use == {"0": {7: [5, 6], 8: [9]}}
    assert ForwardBatch(**BATCH, block_size=2).tables_in_use == {"0": {7: [5, 6, 0], 8: [9]}}


def test_rows_are_left_alone_where_no_block_size_is_given():
    assert ForwardBatch(**BATCH).tables_in_use == BATCH["block_tables"]
