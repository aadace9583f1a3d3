"""What tells one finding from another."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.engines import Capabilities
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.judge import WorkloadJudge, WorkloadJudgement
from harness.extensions.fuzz.result import SentRequest, SentWorkload
from harness.formats.case import RequestSpec
from harness.judge.jobs import check
from harness.oracle.model import load_model
from harness.plan import plan_request
from harness.results.check import Coverage, Divergence, Finding, Outcome, RunResult, TokenResult, Verdict


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
        (WorkloadJudgement(run=run(Outcome.PASS)), None),
        (WorkloadJudgement(run=run(Outcome.NOTHING)), "H051"),
        (WorkloadJudgement(run=run(divergence=wrong(Code.LOCAL_ERROR))), "H040: self_attn.q_proj"),
        (WorkloadJudgement(run=run(divergence=wrong(Code.NOT_FINITE))), "H040: self_attn.q_proj"),
        (WorkloadJudgement(run=run(divergence=wrong(Code.CACHE_DIFFERS, "model.layers.0.k_cache"))), "H047: k_cache"),
        (
            WorkloadJudgement(run=run(findings=[Finding(code=Code.ROWS_MISSING, message="", tap="model.norm")])),
            "H045: model.norm",
        ),
        (WorkloadJudgement(run=run(findings=[Finding(code=Code.TOKENS_DIFFER, message="")])), "H048"),
        (
            WorkloadJudgement(error=HarnessError(Code.ENGINE_FAILED, "block 17 is free\nand more")),
            "H017: block ## is free",
        ),
        (WorkloadJudgement(error=HarnessError(Code.ENGINE_CANNOT_SERVE, "too long")), None),
        (WorkloadJudgement(error=HarnessError(Code.BAD_RECORDER_CALL, "no rows")), "H028: no rows"),
    ],
)
def test_a_signature_is_code_and_operation(judged, signature):
    assert judged.signature == signature


class Declaring:
    """An engine that says of itself what a check has to know; it computes nothing."""

    name = "declaring"
    capabilities = Capabilities(
        schedules=("plain",), sampled_only=("model.norm",), numerics=Numerics(weights=("Q8_0",), cache="float16")
    )

    def run(self, workload, writer):
        """Compute nothing."""


def test_what_an_engine_declares_reaches_the_judge_as_in_a_check(checkpoints, monkeypatch):
    folder = checkpoints / "llama-tiny"
    plan = plan_request(model=str(folder), requests=[RequestSpec(token_ids=[3, 4, 5])])
    declared = []

    def compared(actual, golden, **arguments):
        declared.append((actual.manifest.numerics, arguments))
        return SimpleNamespace(result=run(Outcome.PASS))

    monkeypatch.setattr(check, "compare_run", compared)
    hf = load_model(folder, dtype=torch.float32)
    judge = WorkloadJudge(plan=plan, engine=Declaring(), hf=hf, golden=None, limit_s=60.0)
    workload = SentWorkload(requests=(SentRequest(token_ids=(3, 4, 5), prompt_length=2),), schedule="plain")
    assert judge.judge(workload).error is None
    ((numerics, arguments),) = declared
    assert numerics == Declaring.capabilities.numerics
    assert arguments["requirements"].sampled_only == ("model.norm",)
    assert arguments["requirements"].require == ()
