"""What a pass does not rest on, in words."""

import pytest

from harness.report.check.sentences import _not_judged
from harness.results.check import Coverage


@pytest.mark.parametrize(
    ("coverage", "words"),
    [
        (Coverage(), "nothing"),
        (Coverage(not_judged=("mlp.act",), only_through=("q_rope",)),
         "mlp.act; only through what is computed from them: q_rope"),
        (Coverage(rows_left_out=1_967), "products and attention in 1,967 rows outside of the sample"),
        (Coverage(rows_left_out=1, states_left_out=("request 0: 3",)),
         "products and attention in 1 row outside of the sample; states after some positions: request 0: 3"),
        (Coverage(judged_compute=0.62), "judged outputs are 62 % of the model's multiply-adds"),
    ],
)  # fmt: skip
def test_what_was_not_judged_is_said(coverage: Coverage, words: str) -> None:
    assert _not_judged(coverage) == words
