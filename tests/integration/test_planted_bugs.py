"""Bugs put into the reference engine by hand: found, at the operation and the row where they are, and nowhere else.

Each is one that engines really have, and each leaves the shapes and most of the numbers as they should be.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import reference_engine.model
import reference_engine.model_runner
from harness.errors import Code
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import CheckResult, Outcome, RunResult, Verdict
from reference_engine.attention.paged import PagedAttention

MODELS = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
DTYPES = ("float32", "bfloat16")
BLOCK_SIZE = 16
PROMPT_LENGTHS = (37, 9)
SOUND = {Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION}


def rotate_interleaved(x, cos, sin):
    """Pair neighbours, element 2i with 2i + 1, where HF pairs element i with i + H/2."""
    half = x.shape[-1] // 2
    cos, sin = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def plant_interleaved_rotary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference_engine.model, "apply_rotary", rotate_interleaved)


def plant_decode_position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    build = reference_engine.model_runner.build_batch

    def build_off_by_one(chunks, *args, **kwargs):
        batch = build(chunks, *args, **kwargs)
        is_decode = torch.tensor([chunk.is_decode for chunk in chunks for _ in range(chunk.num_tokens)])
        return dataclasses.replace(batch, positions_T=batch.positions_T + is_decode)

    patch.setattr(reference_engine.model_runner, "build_batch", build_off_by_one)


def plant_wrong_block_in_attention(patch: pytest.MonkeyPatch) -> None:
    """In decode, the second block of request 0 is read from where its first one is."""
    plan = PagedAttention.plan

    def plan_wrongly(self, batch):
        if batch.num_single and batch.context_lens[0] > PROMPT_LENGTHS[0]:  # request 0, decoding
            tables = batch.block_tables_RB.clone()
            tables[0, 1] = tables[0, 0]
            batch = dataclasses.replace(batch, block_tables_RB=tables)  # what is written goes by slot_mapping_T
        return plan(self, batch)

    patch.setattr(PagedAttention, "plan", plan_wrongly)


def plant_wrong_slot_in_read_back(patch: pytest.MonkeyPatch) -> None:
    """The cache is right and attention reads it right; only what is shown of request 0 has two blocks swapped."""
    read_back = PagedAttention.read_back

    def read_back_wrongly(self, layer, block_table, num_tokens):
        if len(block_table) > 2:
            block_table = [block_table[1], block_table[0], *block_table[2:]]
        return read_back(self, layer, block_table, num_tokens)

    patch.setattr(PagedAttention, "read_back", read_back_wrongly)


@dataclass(frozen=True)
class Bug:
    """A bug, and where it must be found."""

    inject: Callable[[pytest.MonkeyPatch], None]
    sites: tuple[str, ...]
    """Sites that are wrong, in every layer: all of them and no others."""
    code: Code
    is_bad: Callable[[int, int, int], bool]
    """Whether the row (request, position, prompt length) is wrong."""


BUGS = {
    "rotary-interleaved": Bug(
        plant_interleaved_rotary,
        ("q_rope", "k_rope"),
        Code.LOCAL_ERROR,
        lambda request, position, prompt_length: position > 0,  # position 0 is not rotated
    ),
    "decode-position-off-by-one": Bug(
        plant_decode_position_off_by_one,
        ("q_rope", "k_rope"),
        Code.LOCAL_ERROR,
        lambda request, position, prompt_length: position >= prompt_length,
    ),
    "wrong-block-in-attention": Bug(
        plant_wrong_block_in_attention,
        ("attention",),
        Code.LOCAL_ERROR,
        lambda request, position, prompt_length: request == 0 and position >= prompt_length,
    ),
    "wrong-slot-in-read-back": Bug(
        plant_wrong_slot_in_read_back,
        ("k_cache", "v_cache"),
        Code.CACHE_DIFFERS,
        lambda request, position, prompt_length: request == 0 and position < 2 * BLOCK_SIZE,
    ),
}


@dataclass(frozen=True)
class Check:
    """A check and the rows it looked at."""

    result: CheckResult
    rows: list[tuple[int, int, int]]
    """(request, position, prompt length)."""

    @property
    def run(self) -> RunResult:
        (run,) = self.result.runs
        return run


@pytest.fixture
def check(checkpoints: Path):
    """Check the reference engine on text-like tokens, with blocks of 16, several requests at once."""

    def checked(model: str, dtype: str, schedule: str = "batched", num_new: int = 4) -> Check:
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        plan = plan_request(
            model=str(checkpoints / model),
            engine="reference",
            dtype=dtype,
            device="cpu",
            requests=[RequestSpec(token_ids=prompt) for prompt in prompts],
            max_new_tokens=num_new,
            schedules=[schedule],
            engine_options={"block_size": str(BLOCK_SIZE)},
        )
        rows = [
            (request, position, length)
            for request, length in enumerate(PROMPT_LENGTHS)
            for position in range(length + num_new - 1)
        ]
        return Check(run_check(plan), rows)

    return checked


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_without_a_bug_nothing_is_found(check, model, dtype):
    run = check(model, dtype).run
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert run.first_divergence is None
    assert {tap.verdict for tap in run.taps} <= SOUND


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found_where_it_is(check, monkeypatch, name, model, dtype):
    bug = BUGS[name]
    bug.inject(monkeypatch)
    checked = check(model, dtype)
    run = checked.run
    bad_rows = [row for row in checked.rows if bug.is_bad(*row)]
    assert run.outcome is Outcome.MISMATCH

    first = run.first_divergence
    assert first.tap == f"model.layers.0.{bug.sites[0]}"
    assert (first.request, first.position) == min(row[:2] for row in bad_rows)
    assert first.code is bug.code

    for tap in run.taps:
        if tap.site not in bug.sites:
            assert tap.verdict in SOUND, f"{tap.name} is sound but for its inputs"
            continue
        assert tap.verdict is Verdict.BUG, tap.name
        assert (tap.first_bad.request, tap.first_bad.position) == min(row[:2] for row in bad_rows), tap.name
        assert tap.num_bad_rows == len(bad_rows), tap.name
    assert {finding.code for finding in run.findings} - {Code.TOKENS_DIFFER} == {bug.code}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["plain", "mixed"])
@pytest.mark.parametrize("name", BUGS)
def test_the_schedule_makes_no_difference(check, monkeypatch, name, schedule):
    bug = BUGS[name]
    bug.inject(monkeypatch)
    checked = check("qwen3-tiny", "float32", schedule)
    first = checked.run.first_divergence
    assert first.tap == f"model.layers.0.{bug.sites[0]}"
    assert (first.request, first.position) == min(row[:2] for row in checked.rows if bug.is_bad(*row))
    wrong = {tap.site for tap in checked.run.taps if tap.verdict is Verdict.BUG}
    assert wrong == set(bug.sites)


@pytest.mark.slow
def test_two_bugs_are_found_in_one_run(check, monkeypatch):
    """The second is not hidden behind the first."""
    plant_decode_position_off_by_one(monkeypatch)
    plant_wrong_block_in_attention(monkeypatch)
    run = check("qwen3-tiny", "bfloat16").run
    assert {tap.site for tap in run.taps if tap.verdict is Verdict.BUG} == {"q_rope", "k_rope", "attention"}
    assert run.first_divergence.tap == "model.layers.0.q_rope"
