"""Check results built by hand: no torch, no engine."""

import math
from dataclasses import replace

from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.results.check import (
    CheckResult,
    Coverage,
    Divergence,
    Explanation,
    Finding,
    LogitResult,
    Outcome,
    Provenance,
    RowId,
    RunResult,
    TapResult,
    TokenResult,
    Verdict,
)

from ..decoder_graph import decoder_graph

NUM_ROWS = 614
ROUNDINGS = {Kind.NORM: 1.37, Kind.LINEAR: 0.994, Kind.ATTENTION: 1.03, Kind.ROTARY: 1.21}


def sound_tap(operation: Operation) -> TapResult:
    """Return an operation that rounds as it should, a little more with every layer."""
    median = ROUNDINGS.get(operation.kind, 0.981)
    is_exact = operation.kind in (Kind.EMBEDDING, Kind.CACHE)
    layer = operation.layer or 0
    tap = TapResult(
        name=operation.tap,
        site=operation.site,
        layer=operation.layer,
        kind=operation.kind,
        num_rows=NUM_ROWS,
        verdict=Verdict.EXACT if is_exact else Verdict.NOISE,
        judged_by="cache" if operation.kind is Kind.CACHE else "local",
        propagated_relative_l2_max=0.0031 + layer / 4000,
        propagated_ratio_median=0.98,
        propagated_ratio_max=1.04 + layer / 100,
        worst=RowId(request=1, position=37 + layer),
    )
    if is_exact:
        return replace(tap, propagated_ratio_max=None, propagated_relative_l2_max=None)
    return replace(
        tap,
        local_roundings_median=median,
        local_roundings_p99=median * 1.31,
        local_roundings_max=median * 1.6 + layer / 100,
        local_bound_share_max=median / 3.1 + layer / 500,
    )


def sound_run(schedule: str = "plain", *, num_layers: int = 3) -> RunResult:
    graph = decoder_graph(num_layers=num_layers, has_qk_norm=True)
    taps = tuple(sound_tap(operation) for operation in graph)
    return RunResult(
        schedule=schedule,
        outcome=Outcome.PASS,
        num_rows=NUM_ROWS,
        taps=taps,
        findings=(),
        first_divergence=None,
        tokens=TokenResult(compared=96, equal=95, ties=1),
        logits=LogitResult(num_rows=96, top1_agreement=0.9896, kl_max=1.234e-5, margin_min=0.0312),
        coverage=Coverage(
            expected=len(taps) * NUM_ROWS,
            recorded=len(taps) * NUM_ROWS,
            triggers=("decode", "batch", "block_boundary"),
        ),
        engine_s=1.104,
        compare_s=3.02,
    )


def wrong_run(schedule: str = "batched", *, num_layers: int = 40, layer: int = 20, value: float = 38.2) -> RunResult:
    """Return a run whose rotary embedding is wrong in one layer and, less so, in all later ones."""
    sound = sound_run(schedule, num_layers=num_layers)
    culprit = f"model.layers.{layer}.q_rope"
    at = next(index for index, tap in enumerate(sound.taps) if tap.name == culprit)
    taps = list(sound.taps)
    for index in range(at, len(taps)):
        taps[index] = replace(taps[index], propagated_ratio_max=88.4 * (index - at + 1) / 40)
        if taps[index].site == "q_rope":
            taps[index] = broken(taps[index], value)
    findings = [
        Finding(
            code=Code.LOCAL_ERROR,
            message="38.2 roundings, bound 2.0; the residual vanishes with positions shifted by one",
            tap=tap.name,
            request=1,
            position=17,
        )
        for tap in taps
        if tap.verdict is Verdict.BUG
    ]
    findings.append(Finding(code=Code.TOKENS_DIFFER, message="expected 812, actual 17", request=1, position=23))
    return replace(
        sound,
        outcome=Outcome.MISMATCH,
        taps=tuple(taps),
        findings=tuple(findings),
        first_divergence=Divergence(
            tap=culprit,
            request=1,
            position=17,
            verdict=Verdict.BUG,
            code=Code.LOCAL_ERROR,
            local_roundings=value,
            bound_roundings=2.0,
            propagated_ratio=9.123,
            schedule=schedule,
            step=4,
            phase="decode",
        ),
        tokens=TokenResult(compared=96, equal=90, ties=1),
    )


def broken(tap: TapResult, value: float) -> TapResult:
    return replace(
        tap,
        verdict=Verdict.BUG,
        local_roundings_median=1.24,
        local_roundings_p99=value,
        local_roundings_max=value,
        local_bound_share_max=value / 2,
        num_nan=12 if math.isnan(value) else 0,
        num_bad_rows=37,
        first_bad=RowId(request=1, position=17),
    )


EXPLANATION = Explanation(
    cause="rotary at a position off by one (+1)",
    scope="decode rows",
    residual_before=38.2,
    residual_after=1.42,
    num_rows=37,
    num_explained=36,
    detail="positions: 17 as 18",
    provenance=Provenance(
        layer=20,
        head=1,
        request=1,
        position=17,
        block=4,
        slot=65,
        writer_request=0,
        writer_step=3,
        holds="the key of request 0, position 1",
    ),
)


def explained_run() -> RunResult:
    """Return `wrong_run` with its cause."""
    run = wrong_run()
    assert run.first_divergence is not None
    findings = (replace(run.findings[0], explanation=EXPLANATION), *run.findings[1:])
    return replace(run, findings=findings, first_divergence=replace(run.first_divergence, explanation=EXPLANATION))


def check(*runs: RunResult) -> CheckResult:
    return CheckResult(
        engine="reference",
        model="qwen3-tiny",
        dtype="bfloat16",
        device="cpu",
        num_requests=3,
        runs=runs,
        golden_s=2.314,
    )


def build(name: str) -> CheckResult:
    """Return the check called `name`."""
    sound = sound_run()
    if name == "pass":
        return check(sound, sound_run("chunked"), sound_run("batched"))
    if name == "mismatch":
        return check(wrong_run())
    if name == "nan":
        return check(wrong_run(value=math.nan))
    if name == "schedules":
        return check(sound_run(num_layers=40), sound_run("chunked", num_layers=40), wrong_run())
    if name == "nothing":
        finding = Finding(code=Code.NOTHING_CHECKED, message="the engine offers neither taps nor tokens")
        empty = replace(sound, outcome=Outcome.NOTHING, taps=(), num_rows=0, findings=(finding,), logits=None)
        return check(replace(empty, tokens=TokenResult(), coverage=Coverage(), engine_s=None, compare_s=None))
    if name == "explained":
        return check(explained_run())
    if name == "missing":
        return check(missing_run())
    raise ValueError(name)


def missing_run() -> RunResult:
    """Return a run whose engine left the attention of one layer out, and never offered the gate."""
    sound = sound_run()
    gone = "model.layers.1.attention"
    taps = tuple(
        TapResult(name=gone, site=tap.site, layer=1, kind=tap.kind, num_rows=0, verdict=Verdict.MISSING)
        if tap.name == gone
        else tap
        for tap in sound.taps
        if tap.site != "mlp.gate_proj"
    )
    return replace(
        sound,
        outcome=Outcome.MISMATCH,
        taps=taps,
        findings=(Finding(code=Code.TAP_MISSING, message="expected and not recorded", tap=gone),),
        coverage=replace(
            sound.coverage,
            recorded=sound.coverage.expected - NUM_ROWS,
            missing=NUM_ROWS,
            missing_taps=(gone,),
            not_offered=("mlp.gate_proj",),
        ),
    )


NAMES = ("pass", "mismatch", "explained", "nan", "schedules", "nothing", "missing")
