"""A sound pair has a gap of rounding alone; of each fault, planted in one side, the gap goes to its term."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import harness
from harness.formats.checkpoint import resolve
from harness.oracle.model import load_model
from harness.plan import plan_engine
from harness.results.check import Outcome

from .planted import (
    EightBitCache,
    TruncatedCache,
    decoded,
    float32_head,
    jittering_router,
    other_checkpoint,
    renormalised,
)
from .training import BOS, prompts, restarting, rollout, running_on, train_column, write_rows

MOE = "qwen3-moe-tiny"
SMALLEST = "llama-tiny"


def with_engine(rows, columns):
    return [{**row, "engine_logprobs": column} for row, column in zip(rows, columns, strict=True)]


def outside(result):
    return [term for term in result.terms if not term.is_rounding]


def assert_adds_up(result):
    assert sum(term.mean for term in result.terms) == pytest.approx(result.gap.mean, abs=1e-12)


def assert_only(result, kind, side, *, share=0.75):
    """Assert that one term is outside of its floor, and explains most of the gap."""
    assert_adds_up(result)
    assert result.outcome is Outcome.MISMATCH
    (term,) = outside(result)
    assert (term.kind, term.side) == (kind, side)
    assert term.explains > share * result.gap.mean_abs
    assert term.remedy
    (finding,) = result.findings
    assert finding.code == "H235"
    assert finding.message.startswith(f"{kind}: ")
    return term


def assert_sound(result):
    assert_adds_up(result)
    assert outside(result) == []
    assert result.outcome is Outcome.PASS


def test_a_sound_pair_has_a_gap_of_rounding(compare, rows, columns):
    result = compare(rows, columns)
    assert_sound(result)
    assert 0 < result.gap.mean_abs < 0.05
    assert result.tokens.compared == sum(len(row["response_ids"]) for row in rows)
    assert [side.source for side in result.sides] == ["recorded", "recorded"]
    assert result.not_judged[0] == "operations of the trainer (--trainer)"


def test_what_no_column_tells_is_said(compare, rows, columns):
    """Rows that one seed drew, and how tokens were drawn at all."""
    result = compare([*rows, {**rows[0], "ref_log_prob": [0.0]}], [*columns, columns[0]])
    assert result.outcome is Outcome.PASS
    said = "; ".join(result.not_judged)
    assert "how the tokens were drawn, only their log probabilities" in said
    assert "rows with the tokens of an earlier row, as one seed gives them: 1; the fields ref_log_prob" in said


def test_a_pair_in_float16_is_sound(tmp_path):
    path = write_rows(tmp_path / "rollouts.jsonl", rollout(SMALLEST, prompts(2), dtype="float16", num_tokens=6))
    assert_sound(harness.rollout(path, model=SMALLEST, dtype="float16"))


def test_the_log_of_the_engine_alone_is_held_against_the_model(compare, rows):
    result = compare(rows)
    assert_sound(result)
    assert result.not_judged[0] == "the trainer (the named model in high precision stands in its place)"


@pytest.mark.slow
def test_both_sides_at_hand_are_split_in_operations(compare, rows, trainer):
    engine = plan_engine(model="llama-tiny", engine="reference", dtype="bfloat16")
    result = compare(rows, trainer=trainer, layout="packed", engine=engine)
    assert_sound(result)
    kinds = [(term.kind, term.side) for term in result.terms]
    assert ("operations", "trainer") in kinds
    assert ("operations", "engine") in kinds


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "left", "right"])
def test_a_trainer_may_be_padded(compare, rows, trainer, layout):
    assert_sound(compare(rows[:4], trainer=trainer, layout=layout))


def test_a_stale_layer_of_the_engine(compare, trainer, tmp_path):
    old = other_checkpoint("llama-tiny", tmp_path / "old", "layers.1.")
    stale = rollout(old, prompts())
    term = assert_only(compare(stale, train_column(trainer, stale), previous=old), "weights", "engine")
    assert "model.layers.1 is the earlier one" in term.detail or "layers.1." in term.detail


@pytest.mark.slow
def test_a_stale_layer_of_the_trainer(compare, rows, tmp_path):
    old = other_checkpoint("llama-tiny", tmp_path / "old", "layers.1.")
    module = load_model(old, dtype=torch.bfloat16, stays=True).model
    term = assert_only(compare(rows, trainer=module), "weights", "trainer")
    assert "7 tensors are other than the model's" in term.detail
    assert term.detail.count("(5 % off)") == 3, term.detail


@pytest.mark.slow
def test_a_temperature_in_one_side_only(compare, rows, trainer):
    result = compare(rows, train_column(trainer, rows, temperature=0.7))
    assert "temperature 0.7, no truncation" in assert_only(result, "meaning", "trainer").detail
    assert [side.is_explained for side in result.sides] == [True, True]


@pytest.mark.slow
def test_a_truncated_distribution_that_one_side_renormalises(compare, trainer):
    sampled = rollout("llama-tiny", prompts(), top_p=0.8)
    recorded = with_engine(sampled, renormalised(trainer, sampled, 0.8))
    term = assert_only(compare(recorded, train_column(trainer, sampled)), "meaning", "engine")
    assert "renormalised over the truncated distribution" in term.detail


@pytest.mark.slow
def test_packing_without_a_restart(compare, rows, trainer):
    assert_sound(compare(rows, train_column(trainer, rows, packs=restarting)))
    assert_only(compare(rows, train_column(trainer, rows, packs=running_on)), "positions", "trainer")


@pytest.mark.slow
def test_packing_whose_attention_sees_other_rows(compare, rows, trainer):
    leaking = train_column(trainer, rows, packs=restarting, use_cache=True)
    term = assert_only(compare(rows, leaking), "positions", "trainer")
    assert "positions restart, attention does not" in term.detail


@pytest.mark.slow
def test_a_missing_begin_of_text_token(compare, rows, trainer):
    without = train_column(trainer, [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows])
    term = assert_only(compare(rows, without), "tokens", "trainer")
    assert "no begin-of-text token" in term.detail


@pytest.mark.slow
def test_a_cache_in_eight_bits(compare, rows, columns, trainer):
    assert_sound(compare(with_engine(rows, decoded(trainer, rows, DynamicCache)), columns))
    eight = with_engine(rows, decoded(trainer, rows, EightBitCache))
    term = assert_only(compare(eight, columns), "cache", "engine", share=0.6)
    assert "fp8 (e4m3)" in term.detail


@pytest.mark.slow
def test_a_cache_in_eight_bits_that_are_cut_off(compare, rows, columns, trainer):
    cut = with_engine(rows, decoded(trainer, rows, TruncatedCache))
    term = assert_only(compare(cut, columns), "cache", "engine", share=0.6)
    assert "fp8 (e4m3), rounded towards zero" in term.detail


@pytest.mark.slow
def test_a_head_in_16_bits(compare, rows, trainer):
    with float32_head(trainer):
        wide = with_engine(rows, train_column(trainer, rows))
        assert_sound(compare(wide, trainer=trainer, head="float32"))
    assert_only(compare(wide, trainer=trainer, head="float32"), "head", "trainer")


@pytest.mark.slow
def test_a_router_without_replay(compare):
    module = load_model(Path(resolve(MOE)), dtype=torch.bfloat16, stays=True).model
    sampled = rollout(MOE, prompts())
    recorded, replayed = [], train_column(module, sampled)
    for row in sampled:
        seen = []
        with jittering_router(size=0.3, seen=seen):
            (column,) = train_column(module, [row])
        recorded.append({**row, "engine_logprobs": column, "routed_experts": torch.stack(seen, dim=1).tolist()})
    result = compare(recorded, replayed, model=MOE)
    assert_only(result, "routing", "trainer")
    # The engine's column is what a trainer computes that replays its experts.
    assert result.remedied < 0.3 * result.gap.mean_abs
    assert_sound(compare(recorded, [row["engine_logprobs"] for row in recorded], model=MOE))


@pytest.mark.slow
def test_a_column_that_stands_one_token_late(compare, rows, trainer):
    before = [
        {"prompt_ids": row["prompt_ids"][:-1], "response_ids": [row["prompt_ids"][-1], *row["response_ids"]]}
        for row in rows
    ]
    late = [column[:-1] for column in train_column(trainer, before)]
    term = assert_only(compare(rows, late), "alignment", "trainer")
    assert "one token too late" in term.detail


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-tiny", "gemma3-tiny"])
def test_values_at_the_ends_of_a_late_column_are_part_of_its_term(compare, rows, model):
    columns = train_column(load_model(Path(resolve(model)), dtype=torch.bfloat16, stays=True).model, rows)
    late = [[column[0], *column[:-1]] for column in columns]
    result = compare(with_engine(rows, columns), late, model=model)
    assert_adds_up(result)
    assert [term.kind for term in outside(result)] == ["alignment"]
    assert result.remedied < 0.05 * result.gap.mean_abs


@pytest.mark.slow
def test_a_column_that_stands_early_beside_another_text(compare, rows, columns, trainer):
    more = [{**row, "prompt_ids": [BOS, *row["prompt_ids"]]} for row in rows]
    early = [[*column[1:], column[-1]] for column in train_column(trainer, more)]
    result = compare(with_engine(rows, early), columns)
    assert_adds_up(result)
    assert [term.kind for term in outside(result)] == ["tokens", "alignment"]


@pytest.mark.slow
def test_two_faults_are_told_apart(compare, rows, trainer):
    cut = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
    result = compare(rows, train_column(trainer, cut, temperature=0.6))
    assert_adds_up(result)
    assert [term.kind for term in outside(result)] == ["tokens", "meaning"]


def mean_gap(rows, columns):
    recorded = [value for row in rows for value in row["engine_logprobs"]]
    return float(
        (torch.tensor([value for column in columns for value in column]) - torch.tensor(recorded)).abs().mean()
    )


@pytest.mark.slow
def test_a_remedy_explains_what_it_does_by_itself(compare, rows, columns, trainer):
    cut = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
    faulty = train_column(trainer, cut, temperature=0.6)
    result = compare(rows, faulty)
    mended = {"tokens": train_column(trainer, rows, temperature=0.6), "meaning": train_column(trainer, cut)}
    actual = {kind: mean_gap(rows, faulty) - mean_gap(rows, column) for kind, column in mended.items()}
    assert {term.kind: term.explains for term in outside(result)} == pytest.approx(actual, rel=0.01)
    assert result.remedied == pytest.approx(mean_gap(rows, columns), rel=0.01)
    assert result.gap.mean_abs > 2 * mean_gap(rows, train_column(trainer, rows, temperature=0.6)), "they interact"


@pytest.mark.slow
def test_a_remedy_of_a_part_leaves_its_rounding(compare, rows, columns):
    wrong = load_model(Path(resolve(SMALLEST)), dtype=torch.bfloat16, stays=True).model
    wrong.model.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    result = compare(rows, trainer=wrong, layout="alone")
    (term,) = outside(result)
    assert term.remedy.startswith("compute model.layers.1.mlp.down_proj as HF does")
    actual = mean_gap(rows, train_column(wrong, rows)) - mean_gap(rows, columns)
    assert term.explains == pytest.approx(actual, abs=mean_gap(rows, columns))
    assert result.gap.mean_abs - result.remedied == pytest.approx(term.explains)


@pytest.mark.slow
def test_two_sides_that_are_alike_and_run_another_model_are_said(compare, rows):
    rival_column = [[-0.5 - at % 7 for at, _ in enumerate(row["response_ids"])] for row in rows]
    result = compare(with_engine(rows, rival_column), rival_column)
    assert_sound(result)
    assert "both sides are outside of their floors, and alike: look whether --model is what they run" in result.notes
    assert "both sides" not in " ".join(compare(rows, [row["engine_logprobs"] for row in rows]).notes)


def test_a_sound_pair_has_no_remedy(compare, rows, columns):
    result = compare(rows, columns)
    assert result.remedied is None
    assert {term.remedy for term in result.terms} == {""}


@pytest.mark.slow
def test_what_no_cause_explains_is_said(compare, rows, columns):
    wrong = [[value - 0.5 * (at % 3) for at, value in enumerate(column)] for column in columns]
    result = compare(rows, wrong)
    assert_adds_up(result)
    assert [term.kind for term in outside(result)] == ["rest"]
    assert "no known cause fits the rest" in result.findings[0].message


@pytest.mark.slow
def test_terms_stand_in_the_order_in_which_they_are_applied(compare, rows, trainer):
    cut = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
    kinds = [term.kind for term in compare(rows, train_column(trainer, cut, temperature=0.6)).terms]
    order = ["tokens", "positions", "weights", "routing", "cache", "head", "operations", "meaning", "alignment", "rest"]
    assert all(order.index(a) < order.index(b) for a, b in pairwise(kinds))


def test_nothing_is_compared_where_all_is_masked(compare, rows, columns):
    masked = [{**row, "mask": [0] * len(row["response_ids"])} for row in rows]
    result = compare(masked, columns)
    assert result.outcome is Outcome.NOTHING
    assert result.gap is None


def test_a_row_without_the_trainers_column_is_counted(compare, rows, columns):
    some = [{**row, "trainer_logprobs": column} for row, column in zip(rows, columns, strict=True)]
    del some[2]["trainer_logprobs"]
    result = compare(some)
    assert_sound(result)
    assert result.tokens.without_value == len(rows[2]["response_ids"])
    assert f"{result.tokens.without_value} tokens without a value" in result.not_judged
