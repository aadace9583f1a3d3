"""Which findings are explained, by which of the ways, and what a cache was to hold; nothing is run or judged here."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Locator, Rows
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.explain import run
from harness.judge.explain.run import Explainer, explain_run
from harness.oracle.golden import Golden
from harness.results.check import Coverage, Divergence, Explanation, Finding, Outcome, RunResult, TokenResult, Verdict

from .toys import ToyModel, random, recorded

KEY, CACHE, LINEAR, HEAD, CHOICE = (
    "model.layers.1.k_rope",
    "model.layers.1.k_cache",
    "model.layers.1.up",
    "lm_head",
    "c",
)
OPERATIONS = (
    Operation(tap=KEY, kind=Kind.ROTARY, source=KEY), Operation(tap=CACHE, kind=Kind.CACHE, inputs=(KEY,)),
    Operation(tap=LINEAR, kind=Kind.LINEAR, inputs=(KEY,), source=LINEAR), Operation(tap=CHOICE, kind=Kind.CHOICE),
    Operation(tap=HEAD, kind=Kind.LINEAR, source=HEAD),
)  # fmt: skip
TOKENS = ([5, 6, 7, 8, 9, 1], [5, 6, 7, 30, 31, 2], [40, 41, 2])
"""The first two requests begin alike, so that the second computes only what differs."""
PLACES = [*((0, p) for p in range(5)), (1, 3), (1, 4), (2, 0)]
KEYS = {place: random(4, seed=at) for at, place in enumerate(PLACES)}
GOLDEN = {(2, 1): random(4, seed=50), **{place: random(4, seed=60 + at) for at, place in enumerate(PLACES)}}


def recording_of(folder, keys):
    places = list(keys)
    step = {"request": [r for r, _ in places], "position": [p for _, p in places],
            "taps": {KEY: torch.stack([keys[place] for place in places])}}  # fmt: skip
    return recorded(folder, [step], lengths=((6, 4), (6, 4), (3, 2)), tokens=TOKENS, dtype="float64")


def result(*findings, first=None):
    return RunResult(
        schedule="plain", outcome=Outcome.MISMATCH, num_rows=0, taps=(), findings=findings, first_divergence=first,
        tokens=TokenResult(), logits=None, coverage=Coverage(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return recording_of(folder / "engine", KEYS), recording_of(folder / "golden", GOLDEN)


@pytest.fixture
def explainer(recordings):
    def make(errors=None, caches=None, evidence=None, findings=()):
        engine, golden = recordings
        model = ToyModel(*OPERATIONS, modules={LINEAR: nn.Linear(4, 4), HEAD: nn.Linear(4, 4)})
        model.graph.__dict__["logits"] = HEAD
        explanation = SimpleNamespace(
            result=result(*findings), errors=(errors or {}) | (caches or {}), evidence=evidence or {}, states=None
        )
        return Explainer(explanation, engine, Golden(golden), model, ExitStack())

    return make


def rows(*places):
    return Rows(request=torch.tensor([r for r, _ in places]), position=torch.tensor([p for _, p in places]),
                step=torch.zeros(len(places), dtype=torch.int64))  # fmt: skip


# What a cache was to hold.


def test_a_row_of_the_cache_is_its_own_or_that_of_the_same_tokens_or_the_goldens(explainer):
    places = [(1, 4), (2, 1), (1, 1), (0, 3), (1, 2), (2, 0)]
    written = explainer()._written(KEY, rows(*places))
    expected = [KEYS[1, 4], GOLDEN[2, 1], KEYS[0, 1], KEYS[0, 3], KEYS[0, 2], KEYS[2, 0]]
    assert torch.equal(written, torch.stack(expected))
    assert explainer()._written(KEY, rows((2, 1))).tolist() == [GOLDEN[2, 1].tolist()]
    assert explainer()._written(KEY, rows((2, 0), (2, 2))) is None, "nobody computed it"


def errors_of(places, bad, *, effect=None, unrecorded=()):
    numbers = torch.arange(1.0, len(places) + 1, dtype=torch.float64)
    roundings = torch.where(torch.tensor(bad), 10 * numbers, 0.0)
    return LocalErrors(rows=rows(*places), roundings=roundings, bound=numbers, effect=effect, unrecorded=unrecorded)


def test_the_wrong_rows_of_a_cache_in_the_order_of_their_places(explainer):
    places = [(1, 4), (0, 3), (1, 1), (0, 0), (2, 0)]
    evidence = explainer()._cache_evidence(OPERATIONS[1], errors_of(places, [True, True, False, True, False]))
    assert list(zip(evidence.rows.request.tolist(), evidence.rows.position.tolist(), strict=True)) == [
        (0, 0),
        (0, 3),
        (1, 4),
    ]
    assert evidence.roundings.tolist() == [40, 20, 10]
    assert evidence.bound.tolist() == [4, 2, 1]
    assert torch.equal(evidence.expected, torch.stack([KEYS[0, 0], KEYS[0, 3], KEYS[1, 4]]))
    assert torch.equal(evidence.inputs[0], evidence.expected)
    assert explainer()._cache_evidence(OPERATIONS[1], errors_of([(2, 2)], [True])) is None


# Which findings are explained.

CAUSE = Explanation(cause="yes", scope="", residual_before=None, residual_after=None, num_rows=0, num_explained=0)


def finding(code, tap=None, **place):
    return Finding(code=code, message="", tap=tap, **place)


@pytest.mark.parametrize("code", [Code.LOCAL_ERROR, Code.NOT_FINITE, Code.CACHE_DIFFERS, Code.SYSTEMATIC_ERROR])
def test_findings_about_numbers_of_an_operation(explainer, monkeypatch, code):
    monkeypatch.setattr(Explainer, "explain", lambda self, operation: CAUSE if operation.tap == LINEAR else None)
    assert explainer().explained(finding(code, LINEAR)).explanation == CAUSE
    assert explainer().explained(finding(code, "no such tap")).explanation is None
    assert explainer().explained(finding(code)).explanation is None
    assert explainer().explained(finding(Code.TAP_MISSING, LINEAR)).explanation is None


def test_an_explanation_that_raises_costs_the_finding_nothing(explainer, monkeypatch):
    def raises(self, operation):
        raise error

    monkeypatch.setattr(Explainer, "explain", raises)
    error = ZeroDivisionError("by zero")
    hypotheses = explainer().explained(finding(Code.LOCAL_ERROR, LINEAR)).explanation
    assert hypotheses.cause == "no explanation: looking for one failed"
    assert hypotheses.detail.startswith("the explanation: ZeroDivisionError: by zero (harness/judge/explain/run.py:")
    assert (hypotheses.is_cause, hypotheses.num_rows, hypotheses.num_explained) == (False, 0, 0)
    error = HarnessError(Code.STEP_ALTERED, "altered")
    with pytest.raises(HarnessError, match="altered"):
        explainer().explained(finding(Code.LOCAL_ERROR, LINEAR))


def test_tokens_and_counts_have_ways_of_their_own(explainer, monkeypatch):
    monkeypatch.setattr(run, "explain_token", lambda recording, logits, request, position: (logits, request, position))
    monkeypatch.setattr(run, "explain_count", lambda operation, recording: operation.tap)
    tokens = Code.TOKENS_DIFFER
    assert explainer().explained(finding(tokens, request=1, position=0)).explanation == (HEAD, 1, 0)
    assert explainer().explained(finding(tokens, request=0)).explanation is None
    assert explainer().explained(finding(tokens, position=3)).explanation is None
    assert explainer().explained(finding(Code.TAP_MISMATCH, CHOICE)).explanation == CHOICE
    assert explainer().explained(finding(Code.TAP_MISMATCH, "no such tap")).explanation is None


@pytest.mark.parametrize(
    ("tap", "bad", "effect", "has_evidence", "way"),
    [
        (LINEAR, True, False, True, "ranked"), (LINEAR, True, True, True, "ranked"),
        (LINEAR, False, True, True, "direction"), (LINEAR, False, False, True, None),
        (LINEAR, True, False, False, "layers"), (LINEAR, False, True, False, None),
        (CACHE, True, False, True, "ranked"),
    ],
)  # fmt: skip
def test_the_way_of_an_operation(explainer, monkeypatch, tap, bad, effect, has_evidence, way):
    monkeypatch.setattr(Explainer, "wrong_operation", lambda self, *_, **__: "wrong rows")
    monkeypatch.setattr(run, "_explained", lambda wrong, where: ("ranked", where))
    monkeypatch.setattr(run, "explain_direction", lambda failure, effect: ("direction", effect))
    monkeypatch.setattr(run, "layers_that_did_not_run", lambda *args: ("layers", args[-1]))
    errors = errors_of([(0, 0), (0, 1)], [bad, False], effect=SimpleNamespace(size=1) if effect else None)
    kept = {tap: errors}
    hypotheses = explainer(kept, kept, {tap: "evidence"} if has_evidence else {})._explain(
        next(operation for operation in OPERATIONS if operation.tap == tap)
    )
    assert (hypotheses if hypotheses is None else hypotheses[0]) == way
    if way in ("ranked", "layers"):
        assert hypotheses[1], "the rows are described"
    assert explainer()._explain(OPERATIONS[2]) is None


@pytest.mark.parametrize(
    ("is_cause", "layer", "has_evidence", "is_said"),
    [(True, 1, False, True), (False, 1, False, False), (True, 2, False, False), (True, 1, True, False)],
)
def test_a_cache_of_a_layer_that_did_not_run_is_explained_by_what_stands_behind_it(
    explainer, monkeypatch, is_cause, layer, has_evidence, is_said
):
    behind = SimpleNamespace(is_cause=is_cause, cause="did not run")
    monkeypatch.setattr(run, "_explained", lambda wrong, where: behind)
    monkeypatch.setattr(run, "layers_that_did_not_run", lambda *args: behind)
    monkeypatch.setattr(
        Explainer,
        "wrong_operation",
        lambda self, evidence, *_, **__: "wrong rows" if evidence == "of the head" else None,
    )
    errors = {HEAD: errors_of([(0, 0)], [True], unrecorded=(f"model.layers.{layer}.up",))}
    caches, evidence = {CACHE: errors_of([(0, 0)], [True])}, {HEAD: "of the head"} if has_evidence else {}
    assert (explainer(errors, caches, evidence)._explain(OPERATIONS[1]) is behind) == is_said


def test_the_first_divergence_has_the_explanation_of_its_tap(recordings, monkeypatch):
    engine, golden = recordings
    model = ToyModel(*OPERATIONS, modules={LINEAR: nn.Linear(4, 4)})
    model.graph.__dict__["logits"] = HEAD
    monkeypatch.setattr(Explainer, "explain", lambda self, operation: CAUSE if operation.tap == LINEAR else None)
    named = finding(Code.LOCAL_ERROR, LINEAR)

    def explained(first, *findings):
        comparison = SimpleNamespace(result=result(*findings, first=first), errors={}, evidence={})
        return explain_run(comparison, engine, Golden(golden), model), comparison

    first, another = (
        Divergence(tap=tap, request=0, position=0, verdict=Verdict.BUG, code=Code.LOCAL_ERROR) for tap in (LINEAR, HEAD)
    )
    assert explained(first, named)[0].first_divergence.explanation == CAUSE
    assert explained(another, named)[0].first_divergence.explanation is None
    assert explained(None, named)[0].findings[0].explanation == CAUSE
    hypotheses, comparison = explained(first, finding(Code.LOCAL_ERROR))
    assert hypotheses is comparison.result, "no finding has a tap"


def test_a_cause_under_what_the_engine_declares_comes_second(monkeypatch):
    monkeypatch.setattr(
        run, "rank_hypotheses", lambda wrong, *_: SimpleNamespace(cause=wrong.name, is_cause=wrong.name in asserted)
    )
    plain, one, two = (SimpleNamespace(name=name, edit_budget=None) for name in ("own", "one", "two"))
    monkeypatch.setattr(run, "declared_failures", lambda failure: [one, two])
    asserted = set()
    for causes, named in ((("own", "two"), "own"), (("two", "one"), "one"), (("two",), "two"), ((), "own")):
        asserted.clear()
        asserted.update(causes)
        assert run._explained(plain, "").cause == named


def test_rows_that_were_not_recorded_or_have_another_width_have_no_failure(explainer):
    def evidence(width, *places):
        return SimpleNamespace(operation=OPERATIONS[0], rows=rows(*places), expected=torch.zeros(len(places), width),
                               roundings=torch.ones(len(places)), bound=torch.ones(len(places)), inputs=[],
                               dtype=torch.float32, views=(), unrecorded=(), part_inputs=None)  # fmt: skip

    assert explainer().wrong_operation(evidence(4, (0, 1), (1, 3)), ExitStack()) is not None
    assert explainer().wrong_operation(evidence(5, (0, 1), (1, 3)), ExitStack()) is None
    assert explainer().wrong_operation(evidence(4, (0, 1), (1, 0)), ExitStack()) is None
    failure = explainer().wrong_operation(evidence(4, (0, 1), (1, 3)), ExitStack())
    assert torch.equal(failure.actual, torch.stack([KEYS[0, 1], KEYS[1, 3]]))
    assert isinstance(failure.locator, Locator)


# Findings of a recording.


def test_several_independent_mistakes_are_each_explained(bench):
    first, second = "model.layers.0.mlp.act", "model.layers.2.self_attn.v_proj"
    gate, up = (bench.tap(f"model.layers.0.mlp.{name}_proj") for name in ("gate", "up"))
    wrong = torch.nn.functional.gelu(gate) * up
    another = bench.tap("model.layers.2.input_layernorm") @ bench.weight("model.layers.1.self_attn.v_proj").T
    recording = bench.planted({first: wrong, second: another})
    explained = explain_run(bench.compare(recording), recording, bench.golden, bench.hf)
    causes = {finding.tap: finding.explanation.cause for finding in explained.findings if finding.explanation}
    assert causes[first].startswith("the activation is GELU")
    assert causes[second] == "the weights are those of model.layers.1.self_attn.v_proj"
    assert explained.first_divergence.tap == first
    assert explained.first_divergence.explanation.cause == causes[first]


def test_a_sound_run_is_returned_as_it_is(bench):
    recording = bench.planted({})
    comparison = bench.compare(recording)
    assert comparison.result.findings == ()
    assert explain_run(comparison, recording, bench.golden, bench.hf) is comparison.result


def test_two_causes_in_one_operation_are_not_one_cause(bench):
    tap = "model.layers.1.attn_residual"
    stream, branch = bench.tap("model.layers.0.output"), bench.tap("model.layers.1.self_attn.o_proj")
    wrong = branch.clone()  # the residual is not added
    wrong[:15] = (stream + 3.7 * branch)[:15]
    explanation = bench.explain(tap, wrong)
    assert not explanation.is_cause
    fits = f"fits {len(wrong) - 15} of {len(wrong)} rows, too few to assert it: the residual is not added"
    assert fits in explanation.detail


def test_which_rows_are_wrong(bench_of):
    bench = bench_of("llama-tiny", schedule="chunked")
    tap, rows = "model.layers.1.mlp.up_proj", bench.rows()
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    scopes = {
        "every row": rows.position >= 0,
        "request 1": rows.request == 1,
        "decode rows": rows.position >= lengths,
        "prefill rows": rows.position < lengths,
        "prefill rows of request 0": (rows.position < lengths) & (rows.request == 0),
        "the last row of each prompt": rows.position == lengths - 1,
        "rows from position 9 on": rows.position >= 9,
        "rows at position 6": rows.position == 6,
        "rows at every 7th position from 7 on": (rows.position % 7 == 0) & (rows.position > 0),
        "2 of 56 rows": (rows.request == 0) & ((rows.position == 3) | (rows.position == 13)),
    }
    for name, bad in scopes.items():
        wrong = bench.tap(tap)
        wrong[bad] = 0
        scope = bench.explain(tap, wrong).scope
        assert scope == name or (name == "2 of 56 rows" and "10th position" in scope)
