"""What is not there, or was never reached, is said: nothing passes because it was not looked at."""

import random
from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code
from harness.formats.recording.manifest import RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare import TOKENS
from harness.judge.compare.align import Locator, Prefixes
from harness.judge.compare.coverage import (
    Requirements,
    check_caches,
    check_coverage,
    check_tokens,
    resumed_rows,
    shared_rows,
    wanted_rows,
)
from harness.judge.compare.triggers import Traits
from harness.results.check import Outcome

from .conftest import LENGTHS, NUM_NEW
from .in_memory import Step, recording_of

NUM_ROWS = sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)
NUM_SAMPLED = len(LENGTHS) * NUM_NEW


def findings(result):
    return [(finding.code, finding.tap, finding.request, finding.position) for finding in result.findings]


def test_all_of_it(one, tmp_path):
    result = one.measure(one.recorded().write(tmp_path / "r"))
    sampled = 2 * NUM_SAMPLED
    assert result.coverage.expected == result.coverage.recorded == NUM_ROWS * (len(one.hf.graph) - 8) + sampled
    assert result.coverage.missing == 0
    assert result.num_rows == NUM_ROWS
    assert findings(result) == []


def test_a_tap_that_is_not_there(one, actual, tmp_path):
    actual.drop("model.layers.1.mlp.act")
    result = one.measure(actual.write(tmp_path / "r"))
    assert findings(result) == [(Code.TAP_MISSING, "model.layers.1.mlp.act", None, None)]
    assert result.outcome is Outcome.MISMATCH
    assert result.coverage.missing_taps == ("model.layers.1.mlp.act",)
    assert result.coverage.missing == NUM_ROWS


def test_a_tap_that_need_not_be_there(one, actual, tmp_path):
    actual.drop("model.layers.1.mlp.act")
    wanted = [op.tap for op in one.hf.graph if op.site != "mlp.act"]
    result = one.measure(actual.write(tmp_path / "r"), wanted=wanted, not_offered=["mlp.act"])
    assert findings(result) == []
    assert result.coverage.not_offered == ("mlp.act",)


def test_the_cache_must_be_read_back_where_it_is_wanted(one, actual, tmp_path):
    actual.steps = list(actual.computing())
    wanted = [op.tap for op in one.hf.graph]
    assert findings(one.measure(actual.write(tmp_path / "a"))) == []
    result = one.measure(actual.write(tmp_path / "b"), wanted=wanted)
    assert [code for code, *_ in findings(result)] == [Code.TAP_MISSING]
    assert set(result.coverage.missing_taps) == {op.tap for op in one.hf.graph if op.kind == "cache"}


@pytest.mark.parametrize(("request_id", "position"), [(1, 0), (0, LENGTHS[0] + NUM_NEW - 2), (2, LENGTHS[2])])
def test_a_row_that_is_not_there(one, tmp_path, request_id, position):
    """Of one tap: the first row of a request, the last of another, the first decoded one."""
    actual, tap = one.recorded("plain"), "model.layers.2.mlp.gate_proj"
    for step in actual.computing():
        row = step.row(request_id, position)
        if row is not None:
            kept = [at for at in range(len(step.request)) if at != row]
            if kept:
                step.taps[tap], step.rows_of[tap] = step.taps[tap][kept], kept
            else:
                del step.taps[tap]
    result = one.measure(actual.write(tmp_path / "r"))
    assert findings(result) == [(Code.ROWS_MISSING, tap, request_id, position)]
    assert result.coverage.missing == 1
    assert result.coverage.missing_taps == ()


def test_a_whole_row_that_is_not_there(one, tmp_path):
    actual = one.recorded("plain")
    actual.steps = [step for step in actual.steps if step.phase == "readback" or step.row(1, LENGTHS[1] + 1) is None]
    result = one.measure(actual.write(tmp_path / "r"))
    missing = [finding for finding in result.findings if finding.code is Code.ROWS_MISSING and finding.tap]
    assert {(finding.request, finding.position) for finding in missing} == {(1, LENGTHS[1] + 1)}
    assert len(missing) == len(one.golden.recording.manifest.taps)


def test_logits_are_wanted_of_sampled_rows_only_and_of_all_of_those(one, tmp_path):
    actual = one.recorded("plain")
    step = next(step for step in actual.computing() if step.row(2, LENGTHS[2] - 1) is not None)
    for tap in ("lm_head",):
        step.taps.pop(tap)
        step.rows_of.pop(tap)
    result = one.measure(actual.write(tmp_path / "r"))
    assert findings(result) == [(Code.ROWS_MISSING, "lm_head", 2, LENGTHS[2] - 1)]


def prefill_only(actual):
    prompts = {request.id: request.prompt_length for request in actual.requests}
    actual.steps = [
        step
        for step in actual.steps
        if all(position < prompts[request] for request, position in zip(step.request, step.position, strict=True))
    ]


def test_no_decode_step(one, tmp_path):
    actual = one.recorded("plain")
    prefill_only(actual)
    result = one.measure(actual.write(tmp_path / "r"))
    assert Code.NO_DECODE in [finding.code for finding in result.findings]
    assert "decode" not in result.coverage.triggers


def test_a_prefill_of_prompt_and_continuation_is_no_decode(one):
    """The golden itself: one forward over everything. An engine that does so never used its cache."""
    result = one.measure(one.golden.recording)
    assert [finding.code for finding in result.findings] == [Code.NO_DECODE]


@pytest.mark.parametrize(
    ("schedule", "engine", "reached"),
    [
        ("plain", "hf", {"decode"}),
        ("chunked:3", "hf", {"decode", "chunked_prefill"}),
        ("batched", "hf", {"decode", "batch", "ragged_batch"}),
        ("plain", "reference", {"decode"}),
    ],
)
def test_triggers(one, tmp_path, schedule, engine, reached):
    result = one.measure(one.recorded(schedule, engine=engine).write(tmp_path / "r"))
    assert set(result.coverage.triggers) == reached


def test_a_block_boundary(one, tmp_path):
    actual = one.recorded("plain")
    step = next(iter(actual.computing()))
    step.block_tables = {0: [4]}
    assert "block_boundary" not in one.measure(actual.write(tmp_path / "a")).coverage.triggers
    step.block_tables = {0: [4, 9]}
    assert "block_boundary" in one.measure(actual.write(tmp_path / "b")).coverage.triggers


@pytest.mark.parametrize("trigger", ["chunked_prefill", "batch", "block_boundary", "window_exceeded"])
def test_a_trigger_that_was_never_reached(one, tmp_path, trigger):
    result = one.measure(one.recorded("plain").write(tmp_path / "r"), require=["decode", trigger])
    assert [finding.code for finding in result.findings] == [Code.TRIGGER_NOT_REACHED]
    assert result.outcome is Outcome.MISMATCH


def test_a_recording_without_steps(one, tmp_path):
    actual = one.recorded("plain")
    actual.steps = []
    result = one.measure(actual.write(tmp_path / "r"))
    assert result.outcome is not Outcome.PASS
    assert result.coverage.recorded == 0


def test_nothing_wanted_and_nothing_there_is_no_pass(one, tmp_path):
    actual = one.recorded("plain")
    actual.steps = []
    result = one.measure(actual.write(tmp_path / "r"), wanted=[], not_offered=[TOKENS])
    assert result.outcome is Outcome.NOTHING


def resumed(*steps, prompt_length=8, others=(7,) * 12):
    """Positions of request 0 that count as found in the cache; steps are lists of (request, position)."""
    requests = [
        RequestInfo(id=0, token_ids=[7] * 12, prompt_length=prompt_length),
        RequestInfo(id=1, token_ids=list(others), prompt_length=8),
    ]
    recorded = [
        SimpleNamespace(
            index=index,
            phase="prefill",
            request=torch.tensor([request for request, _ in step]),
            position=torch.tensor([position for _, position in step]),
        )
        for index, step in enumerate(steps)
    ]
    recording = SimpleNamespace(steps=recorded, manifest=SimpleNamespace(requests=requests))
    return resumed_rows(recording, Prefixes(requests))[0].nonzero()[:, 0].tolist()


BEGUN = [(0, 0), (0, 1)]
SECOND_REQUEST = [(1, at) for at in range(5)]


def test_a_request_that_was_preempted_may_find_more_than_it_had_computed():
    assert resumed(BEGUN, SECOND_REQUEST, [(0, 4)]) == [2, 3]


@pytest.mark.parametrize(
    "resumed_rows",
    [
        resumed(BEGUN, [(0, 4)], SECOND_REQUEST),  # computed later than it was left out
        resumed(BEGUN, [(0, 4)]),  # by nobody
        resumed(BEGUN, SECOND_REQUEST, [(0, 4)], others=(7, 7, 9, 9, 9, 9, 9, 9)),  # other tokens
        resumed(BEGUN, SECOND_REQUEST, [(0, 2), (0, 4)]),  # not where a step begins
        resumed(BEGUN, SECOND_REQUEST, [(0, 3)], prompt_length=2),  # no prompt row: it chooses a token
        resumed(SECOND_REQUEST, [(0, 4)]),  # before its first row, which is the affair of `shared_rows`
    ],
)
def test_rows_that_cannot_have_been_found_are_missing(resumed_rows):
    assert resumed_rows == []


@pytest.mark.parametrize(("kind", "num_dropped"), [(Kind.CACHE, 3), (Kind.ATTENTION, 0), (Kind.STATE, 5)])
def test_only_a_cache_may_drop_rows_before_its_window(kind, num_dropped):
    recording = SimpleNamespace(
        manifest=SimpleNamespace(requests=[RequestInfo(id=0, token_ids=[1] * 6, prompt_length=3)])
    )
    locator = SimpleNamespace(recording=recording, recorded=lambda _tap: torch.zeros(1, 6, dtype=torch.bool))
    graph = {"tap": Operation(tap="tap", kind=kind, window=4)}
    wanted = wanted_rows("tap", locator, graph)
    assert wanted[0].tolist() == [False] * num_dropped + [True] * (6 - num_dropped)
    assert wanted_rows("another", locator, graph).all()


def test_one_choice_that_was_not_reported_is_missing():
    requests = [RequestInfo(id=0, token_ids=[1] * 5, prompt_length=3)]
    recording = SimpleNamespace(manifest=SimpleNamespace(requests=requests))
    locator = SimpleNamespace(recording=recording, computed=torch.ones(1, 5, dtype=torch.bool))
    assert check_tokens(locator, 3) == []
    (finding,) = check_tokens(locator, 2)
    assert finding.code is Code.ROWS_MISSING
    assert finding.message == "the engine reported its own choice at 2 of 3 sampled rows"


# On recordings by hand, against loops over requests and positions.

REQUESTS = {6: (1, 2, 3, 4, 5, 6, 7), 2: (1, 2, 3, 9), 4: (1, 2), 8: (1, 2, 3, 4, 5, 6, 8)}
PROMPT = 3
GRAPH = Graph(
    (
        Operation(tap="hidden", kind=Kind.ADD),
        Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",), window=3),
        Operation(tap="v_cache", kind=Kind.CACHE, inputs=("v",)),
        Operation(tap="logits", kind=Kind.LINEAR, sampled_only=True),
    )
)


def made(steps):
    return recording_of(REQUESTS, steps, prompt_length=PROMPT)


def prompt_of(request):
    return min(PROMPT, len(REQUESTS[request]))


@pytest.mark.parametrize(
    ("tap", "sampled_only", "begin"),
    [
        ("hidden", (), lambda _request: 0),
        ("hidden", ("hidden",), lambda request: prompt_of(request) - 1),
        ("logits", (), lambda request: prompt_of(request) - 1),
        ("unknown", (), lambda _request: 0),
        ("unknown", ["unknown"], lambda request: prompt_of(request) - 1),
        ("k_cache", (), lambda request: max(0, len(REQUESTS[request]) - 2)),
        ("k_cache", ("k_cache",), lambda request: max(prompt_of(request) - 1, len(REQUESTS[request]) - 2)),
        ("v_cache", (), lambda _request: 0),
    ],
)
def test_rows_that_are_wanted(tap, sampled_only, begin):
    wanted = wanted_rows(tap, Locator(made([])), GRAPH, sampled_only)
    for row, request in enumerate(sorted(REQUESTS)):
        num = len(REQUESTS[request])
        assert wanted[row].int().tolist() == [int(begin(request) <= at < num) for at in range(7)]


def content(request, position):
    return REQUESTS[request][: position + 1]


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_were_taken_over_from_others(seed):
    generator = random.Random(seed)
    recorded = torch.zeros(4, 7, dtype=torch.bool)
    for row, request in enumerate(sorted(REQUESTS)):
        for at in range(len(REQUESTS[request])):
            recorded[row, at] = generator.random() < 0.3
    known = {content(sorted(REQUESTS)[row], at) for row, at in recorded.nonzero().tolist()}
    requests = made([]).manifest.requests
    rows = shared_rows(recorded, Prefixes(requests))
    for row, request in enumerate(sorted(REQUESTS)):
        first = next((at for at in range(7) if recorded[row, at]), 0)
        expected = [int(at < first and content(request, at) in known) for at in range(7)]
        assert rows[row].int().tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_were_left_out_in_the_midst_of_a_prompt(seed):
    generator = random.Random(seed)
    steps = []
    for _ in range(7):
        rows = []
        for request in generator.sample(sorted(REQUESTS), 2):
            begin = generator.randrange(len(REQUESTS[request]))
            rows += [(request, at) for at in range(begin, min(begin + generator.randint(1, 3), len(REQUESTS[request])))]
        generator.shuffle(rows)
        steps.append(Step(rows, phase=generator.choice(["prefill", "prefill", "readback"])))
    prompt_length, known, reached, expected = 6, set(), {}, set()
    for step in steps:
        if step.phase == "readback":
            continue
        rows = list(zip(step.request.tolist(), step.position.tolist(), strict=True))
        for request in {request for request, _ in rows}:
            positions = [position for of, position in rows if of == request]
            begin, end = reached.get(request, 0), min(min(positions), min(prompt_length, len(REQUESTS[request])) - 1)
            if begin > 0:
                expected |= {(request, at) for at in range(begin, end) if content(request, at) in known}
            reached[request] = max(begin, max(positions) + 1)
        known |= {content(*row) for row in rows}
    recording = recording_of(REQUESTS, steps, prompt_length=prompt_length)
    actual = resumed_rows(recording, Prefixes(recording.manifest.requests))
    assert {(sorted(REQUESTS)[row], at) for row, at in actual.nonzero().tolist()} == expected


ALL = [(request, at) for request, tokens in REQUESTS.items() for at in range(len(tokens))]


def counted(taps, *, rows=ALL, wanted=None, also=(), require=(), traits=None, **fields):
    """Coverage of one step that holds the rows of these taps; the others are wanted and not there."""
    tensors = {tap: torch.zeros(len(here), 1) for tap, here in taps.items()}
    step = Step(rows, taps=tensors, rows_of={tap: [rows.index(row) for row in here] for tap, here in taps.items()})
    locator = Locator(made([step]))
    required = Requirements(require=require, **fields)
    return check_coverage(locator, GRAPH, wanted or list(taps), required, traits=traits, also=also)


def test_what_is_missing_is_counted_and_named():
    some = [row for row in ALL if row not in [(8, 4), (6, 5), (6, 2), (2, 3)]]
    coverage, findings = counted({"hidden": some, "logits": ALL}, wanted=["hidden", "logits"])
    sampled = sum(len(tokens) - prompt_of(request) + 1 for request, tokens in REQUESTS.items())
    assert coverage.expected == len(ALL) + sampled
    assert (coverage.recorded, coverage.missing) == (len(ALL) + sampled - 4, 4)
    (finding,) = findings
    assert finding.message == "4 rows of hidden are missing, the first at request 2, position 3"
    assert (finding.code, finding.tap, finding.request, finding.position) == (Code.ROWS_MISSING, "hidden", 2, 3)
    assert counted({"hidden": ALL})[1] == []


def test_rows_that_need_not_be_there_do_not_count():
    last = [(request, len(tokens) - 1) for request, tokens in REQUESTS.items()]
    coverage, findings = counted({"hidden": ALL}, sampled_only=["hidden"])
    assert (coverage.expected, coverage.recorded) == (13, 13)
    coverage, findings = counted({"hidden": last}, sampled_only=["hidden"])
    assert (coverage.missing, len(findings)) == (9, 1)


@pytest.mark.parametrize(
    ("num", "shown"),
    [(1, "t0"), (4, "t0, t1, t2, t3"), (5, "t0, t1, t2, t3 and 1 more"), (9, "t0, t1, t2, t3 and 5 more")],
)
def test_taps_that_are_not_there_are_named(num, shown):
    missing = [f"t{at}" for at in range(num)]
    coverage, findings = counted({"hidden": ALL}, wanted=[*missing, "hidden"], not_offered=["x"])
    (finding,) = findings
    assert finding.message == f"not recorded: {shown}"
    assert (finding.code, finding.tap) == (Code.TAP_MISSING, "t0")
    assert coverage.missing_taps == tuple(missing)
    assert coverage.missing == num * len(ALL)
    assert coverage.not_offered == ("x",)


def test_what_was_reached_and_what_not():
    coverage, findings = counted({"hidden": ALL}, also=["near_tie"], require=["near_tie", "batch", "decode", "unheard"])
    assert set(coverage.triggers) == {
        "near_tie",
        "batch",
        "ragged_batch",
        "equal_lengths",
        "shared_prefix",
        "reordered",
    }
    assert [finding.code for finding in findings] == [Code.NO_DECODE, Code.TRIGGER_NOT_REACHED]
    assert "'unheard'" in findings[1].message
    grouped = Traits(num_groups=2, window=None, original_positions=None)
    assert "gqa" in counted({"hidden": ALL}, traits=grouped)[0].triggers


def test_caches_without_a_reference():
    locator = Locator(made([Step([(2, 0)], taps={"k_cache": torch.zeros(1, 1), "hidden": torch.zeros(1, 1)})]))

    def unjudged(usable, judged):
        return [(cache.code, cache.tap, cache.message) for cache in check_caches(locator, GRAPH, usable, judged)]

    message = "k_cache was read back, and neither recording has k to compare it with"
    assert unjudged(["k_cache", "v_cache", "hidden"], []) == [(Code.CACHE_NOT_JUDGED, "k_cache", message)]
    assert unjudged(["k_cache"], ["k_cache"]) == unjudged([], []) == []


@pytest.mark.parametrize(("computed", "expected"), [(range(7), 13), (range(2), 13), (range(5, 7), 10)])
def test_choices_are_expected_at_rows_that_were_computed(computed, expected):
    """A beginning that was taken over with what another computed there has no choice of its own."""
    steps = [Step([(6, at) for at in range(7)]), Step([(8, at) for at in computed])]
    locator = Locator(made(steps))
    assert check_tokens(locator, expected) == check_tokens(locator, expected + 1) == []
    (finding,) = check_tokens(locator, expected - 1)
    assert finding.message.endswith(f"at {expected - 1} of {expected} sampled rows")
