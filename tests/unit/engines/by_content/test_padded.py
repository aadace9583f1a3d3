"""Engines that put requests side by side, each padded to the longest: on the right, or on the left."""

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import harness
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import SiteWatcher, module_paths

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)], [7, 8]]


class Padded:
    """HF's model over a padded batch, which only becomes smaller."""

    def __init__(self, folder, side):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.side, self.requests = side, []

    def step(self, work):
        requests = [request for request, _, _ in work]
        if not set(requests) <= set(self.requests):
            self.requests, self.cache = requests, DynamicCache()
            self.mask = torch.zeros(len(requests), 0, dtype=torch.int64)
        keep = torch.tensor([self.requests.index(request) for request in requests])
        if requests != self.requests:
            self.cache.batch_select_indices(keep)
        self.requests, self.mask = requests, self.mask[keep]
        width = max(len(tokens) for _, tokens, _ in work)
        ids, positions, mask = torch.zeros(3, len(work), width, dtype=torch.int64)
        for row, (_, tokens, first) in enumerate(work):
            begin = self.begin(width, len(tokens))
            columns = slice(begin, begin + len(tokens))
            ids[row, columns], mask[row, columns] = torch.tensor(tokens), 1
            positions[row, columns] = torch.arange(first, first + len(tokens))
        self.mask = torch.cat([self.mask, mask], dim=1)
        options = {"attention_mask": self.seen(), "position_ids": positions, "cache": self.cache}
        logits = self.model(ids, **options).logits
        ends = [self.begin(width, len(tokens)) + len(tokens) - 1 for _, tokens, _ in work]
        return logits[torch.arange(len(work)), ends]

    def begin(self, width, length):
        return width - length if self.side == "left" else 0

    def seen(self):
        return self.mask


class Hidden(Padded):
    """One whose token ids are not shown, as those of an engine that is not torch's."""

    def watching(self, see, only):
        return SiteWatcher(module_paths(self), see, only=only)


class AttendsToPadding(Padded):
    """What a mask that is left out does."""

    def seen(self):
        return torch.ones_like(self.mask)


def check(kind, side, folder, *schedules):
    engine = StepEngine(lambda: kind(folder, side), name="padded", folder=folder, dtype="float32")
    return harness.check(engine, model=folder, prompts=PROMPTS, max_new_tokens=4, schedules=schedules)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_passes(checkpoints, side):
    (run,) = check(Padded, side, checkpoints / "qwen2-tiny", "batched").runs
    assert run.findings == ()
    assert run.coverage.missing == 0
    assert run.tokens.equal == run.tokens.compared == 12


def test_rows_side_by_side_are_told_without_token_ids(checkpoints):
    report = check(Hidden, "right", checkpoints / "qwen2-tiny", "batched")
    assert report.is_ok
    assert sum(report.seen.num_taps.values()) == 48
    assert json.loads(json.dumps(asdict(report.seen)))["num_taps"] == report.seen.num_taps  # from an engine's process


def test_attention_to_padding_is_found(checkpoints):
    (run,) = check(AttendsToPadding, "left", checkpoints / "qwen2-tiny", "batched").runs
    assert run.first_divergence.tap == "model.layers.0.attention"


def test_there_are_no_chunks_beside_decode(checkpoints):
    with pytest.raises(harness.HarnessError, match=r"(?s)H015.*expected: plain, chunked, batched"):
        check(Padded, "left", checkpoints / "qwen2-tiny", "mixed:4")
