"""What tells one finding from another."""

import pytest

from harness.errors import Code, HarnessError
from harness.fuzz.judge import Judged
from harness.results import Coverage, Divergence, Finding, Outcome, RunResult, TokenResult, Verdict


def run(outcome=Outcome.MISMATCH, *, divergence=None, findings=()):
    return RunResult(
        schedule="searched", outcome=outcome, num_rows=1, taps=(), findings=tuple(findings),
        first_divergence=divergence, tokens=TokenResult(), logits=None, coverage=Coverage(),
    )  # fmt: skip


def wrong(code, tap="model.layers.3.self_attn.q_proj"):
    return Divergence(tap=tap, request=0, position=0, verdict=Verdict.BUG, code=code)


@pytest.mark.parametrize(
    ("judged", "signature"),
    [
        (Judged(run=run(Outcome.PASS)), None),
        (Judged(run=run(Outcome.NOTHING)), "H051"),
        (Judged(run=run(divergence=wrong(Code.LOCAL_ERROR))), "H040: self_attn.q_proj"),
        (Judged(run=run(divergence=wrong(Code.NOT_FINITE))), "H040: self_attn.q_proj"),
        (Judged(run=run(divergence=wrong(Code.CACHE_DIFFERS, "model.layers.0.k_cache"))), "H047: k_cache"),
        (Judged(run=run(findings=[Finding(code=Code.ROWS_MISSING, message="", tap="model.norm")])), "H045: model.norm"),
        (Judged(run=run(findings=[Finding(code=Code.TOKENS_DIFFER, message="")])), "H048"),
        (Judged(error=HarnessError(Code.ENGINE_FAILED, "block 17 is free\nand more")), "H017: block ## is free"),
        (Judged(error=HarnessError(Code.ENGINE_CANNOT_SERVE, "too long")), None),
        (Judged(error=HarnessError(Code.BAD_RECORDER_CALL, "no rows")), "H028: no rows"),
    ],
)
def test_a_signature_is_code_and_operation(judged, signature):
    assert judged.signature == signature
