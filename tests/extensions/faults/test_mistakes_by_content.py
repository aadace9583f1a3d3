"""What a map takes where the engine is wrong: HF on the same wrong checkpoint says what each tap is."""

from pathlib import Path

import pytest

from tests.benchmarks.content_faults import false_taps, hf_rows, opened, planted
from tests.benchmarks.engines_by_content import rows_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mistake"),
    [
        ("deepseek-v3-tiny", "another activation"),  # the addends of a sum are the same in any order
        ("qwen3-next-tiny", "another activation"),  # zeros and the sum are addends, too
        ("qwen3-next-tiny", "another eps"),  # the third router is of the fourth layer
    ],
)
def test_a_tensor_is_not_taken_for_a_tap_that_another_one_holds(
    model: str, mistake: str, checkpoints: Path, tmp_path: Path
) -> None:
    right, wrong = checkpoints / model, tmp_path / "wrong"
    planted(right, mistake, wrong)
    rows, report = rows_of(opened("module", wrong, right, tmp_path), right, "float32")
    assert report.runs[0].findings
    assert len({tap for tap, *_ in rows}) > 50
    assert false_taps(rows, hf_rows(wrong, right)) == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["heads of queries rolled", "rotary pairs of keys interleaved"])
def test_a_layer_has_no_order_of_heads_of_its_own(mistake: str, checkpoints: Path, tmp_path: Path) -> None:
    """Packed and permuted heads are an engine's right, in all layers alike."""
    right, wrong = checkpoints / "llama-tiny", tmp_path / "wrong"
    where = planted(right, mistake, wrong)
    rows, report = rows_of(opened("module", wrong, right, tmp_path), right, "float32")
    first = report.runs[0].first_divergence
    assert first is not None
    assert first.tap == where
    assert false_taps(rows, hf_rows(wrong, right)) == []
