"""What a step engine keeps, and for how long: requests that end, schedules that end, and the format of its cache."""

import pytest
import torch

import harness
from harness.base.numerics import CACHE_FORMATS, Numerics
from harness.engines.declared import declared_numerics
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.cache_format import BLOCKS, FORMATS, GRIDS

SHARED = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40]
PROMPTS = [[*SHARED, 77, 31, 90], [*SHARED, 11, 150, 28, 99]]
OF_MANY_LENGTHS = [[5, 9, 14, 3, 8], [7, 8, 9, 10, 33, 12, 40, 77, 31, 90], [33, 12, 40, 77]]
SCALE = 0.04


def check(engine, checkpoints, prompts=PROMPTS, schedules=("plain",)):
    return harness.check(
        engine, model=checkpoints / "qwen2-tiny", prompts=prompts, max_new_tokens=3, schedules=schedules
    )


@pytest.fixture
def prefix_engine(fused, checkpoints):
    """Return an engine that keeps what has ended and reuses it by its tokens, as servers do."""

    class PrefixEngine(fused.FusedEngine):
        off = 0
        """Slots by which the reused ones are wrong."""

        def __init__(self, has_reset=False):
            super().__init__(checkpoints / "qwen2-tiny")
            self.kept, self.ids, self.events = [], {}, []
            for layer in self.model.layers:
                layer.attn.cache = layer.attn.cache.repeat(1, 8, 1, 1, 1)
            self.free = list(range(512))
            if has_reset:
                self.reset = lambda: self.kept.clear() or self.events.append(("reset", None))

        def begin(self, request, token_ids):
            best, table = 0, []
            for ids, slots in self.kept:
                pairs = list(zip(ids, token_ids[:-1], strict=False))
                same = next((at for at, (one, two) in enumerate(pairs) if one != two), len(pairs))
                if same // fused.BLOCK * fused.BLOCK > best:
                    best, table = same // fused.BLOCK * fused.BLOCK, slots
            self.slots[request] = [slot + self.off for slot in table[:best]]
            self.ids[request] = list(token_ids[:best])
            return best

        def step(self, work):
            self.events.append(("step", [request for request, _, _ in work]))
            for request, tokens, first in work:
                self.ids[request] = self.ids.get(request, [])[:first] + list(tokens)
            return super().step(work)

        def finish(self, request):
            self.events.append(("finish", request))
            self.kept.append((self.ids.pop(request), self.slots.pop(request)))

    return PrefixEngine


def test_each_request_is_finished_before_the_next_step(prefix_engine, checkpoints):
    engine = prefix_engine()
    check(engine, checkpoints, OF_MANY_LENGTHS, ["mixed:4"]).assert_ok()
    requests = [request for kind, request in engine.events if kind == "finish"][-6:]  # two runs, one of them as served
    for request in requests:
        last = max(at for at, (kind, item) in enumerate(engine.events) if kind == "step" and request in item)
        between = engine.events[last + 1 : engine.events.index(("finish", request))]
        assert [kind for kind, _ in between if kind == "step"] == []
    assert requests != sorted(requests), "all end in the order in which they came: the test shows nothing"


def test_a_cache_is_emptied_between_schedules_where_that_is_possible(prefix_engine, checkpoints):
    engine = prefix_engine(has_reset=True)
    result = check(engine, checkpoints, schedules=["plain", "prefix-hit"])
    result.assert_ok()
    resets = [at for at, (kind, _) in enumerate(engine.events) if kind == "reset"]
    finishes = [at for at, (kind, _) in enumerate(engine.events) if kind == "finish"]
    finished = [sum(at < reset for at in finishes) for reset in resets]
    assert [number - finished[0] for number in finished] == [0, 2, 6], "and before the run as served"
    assert not any("outlives" in note for note in result.notes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["plain", "chunked:3"])
def test_a_cache_that_outlives_a_schedule_is_no_mistake(prefix_engine, checkpoints, first):
    result = check(prefix_engine(), checkpoints, schedules=[first, "prefix-hit"])
    result.assert_ok()
    assert [run.coverage.missing for run in result.runs] == [0, 0]
    (note,) = (note for note in result.notes if "outlives" in note)
    assert "prefix-hit: the cache outlives a schedule: 12 prompt tokens were cached" in note
    assert "reset()" in note


def test_an_engine_is_checked_twice(prefix_engine, checkpoints):
    engine = prefix_engine()
    for outlives in (False, True):
        result = check(engine, checkpoints, schedules=["prefix-hit"])
        result.assert_ok()
        assert any("outlives" in note for note in result.notes) == outlives


def test_what_outlived_a_schedule_is_judged(prefix_engine, checkpoints):
    """The engine reuses the next block."""
    engine = prefix_engine()
    engine.off = 4
    plain, hit = check(engine, checkpoints, schedules=["plain", "prefix-hit"]).runs
    assert plain.findings == ()
    assert hit.first_divergence.tap == "model.layers.0.attention"
    assert hit.first_divergence.request == 0


def test_a_hit_of_tokens_that_were_never_computed_is_wrong(prefix_engine, checkpoints):
    engine = prefix_engine()
    begin = engine.begin

    def invented(request, token_ids):
        if begin(request, token_ids):
            return len(engine.ids[request])
        engine.slots[request], engine.ids[request] = list(range(300, 304)), list(token_ids[:4])
        return 4

    engine.begin = invented
    (run,) = check(engine, checkpoints, schedules=["prefix-hit"]).runs
    assert run.first_divergence.tap == "model.layers.0.attention"


class Freeing:
    """Gives the blocks of a request that ends back to the engine."""

    def __init__(self, engine, num_blocks, most=99):
        self.engine, self.model, self.most = engine, engine.model, most
        engine.free = engine.free[:num_blocks]

    def step(self, work):
        if len(work) > self.most:
            raise ValueError("too many requests")
        return self.engine.step(work)

    def finish(self, request):
        self.engine.free += [slot // 4 for slot in self.engine.slots.pop(request)[::4]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_blocks", "most"), [(10, 99), (64, 5), (64, 1)])
def test_an_engine_of_little_memory_is_learned_from_a_few_requests_at_once(fused, checkpoints, num_blocks, most):
    engine = Freeing(fused.FusedEngine(checkpoints / "qwen2-tiny"), num_blocks, most)
    result = check(engine, checkpoints, [SHARED])
    result.assert_ok()
    assert len(result.runs[0].taps) == 48
    assert (len(engine.engine.free), engine.engine.slots) == (num_blocks, {})


def test_what_an_engine_is_learned_from_leaves_room_where_nothing_is_freed(fused, checkpoints):
    engine = fused.FusedEngine(checkpoints / "qwen2-tiny")
    engine.free = engine.free[:40]
    result = check(engine, checkpoints, [SHARED])
    result.assert_ok()
    assert len(result.runs[0].taps) == 48


def test_an_engine_without_memory_is_told_what_it_lacks(fused, checkpoints):
    engine = fused.FusedEngine(checkpoints / "qwen2-tiny")
    engine.free = engine.free[:20]
    with pytest.raises(HarnessError, match="pop from empty list") as caught:
        check(engine, checkpoints, [SHARED])
    assert caught.value.code is Code.ENGINE_FAILED
    assert "finish(request)" in caught.value.hint


@pytest.fixture
def float8_engine(fused, checkpoints):
    """Return an engine whose cache is float8 with a scale; what it declares is set by keyword."""

    class Float8Engine(fused.FusedEngine):
        def __init__(self, write_scale=SCALE, **declared):
            super().__init__(checkpoints / "qwen2-tiny")
            vars(self).update(declared)
            for layer in self.model.layers:
                layer.attn.store = self.rounding(layer.attn.store, layer.attn.shape, write_scale)

        @staticmethod
        def rounding(store, shape, write_scale):
            def rounded(part, rows, slots):
                heads = (rows.view(len(rows), *shape) / write_scale).clamp(-448, 448)
                store(part, heads.to(torch.float8_e4m3fn).float() * SCALE, slots)

            return rounded

        def cached(self, request):
            slots = torch.tensor(self.slots[request])
            block, slot = slots // fused.BLOCK, slots % fused.BLOCK
            layers = enumerate(self.model.layers)
            return {at: tuple(part[block, :, :, slot] for part in layer.attn.cache) for at, layer in layers}

    return Float8Engine


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "declared",
    [
        {"cache_dtype": "float8_e4m3fn", "cache_scale": SCALE},
        {"cache_dtype": torch.float8_e4m3fn, "cache_scale": torch.tensor([SCALE, SCALE], dtype=torch.float64)},
        {"numerics": {"cache": "float8_e4m3fn"}, "cache_scale": [SCALE, SCALE]},
    ],
)
def test_a_declared_cache_passes(float8_engine, checkpoints, declared):
    result = check(float8_engine(**declared), checkpoints, [SHARED])
    result.assert_ok()
    (cache,) = (tap for tap in result.runs[0].taps if tap.name == "model.layers.0.k_cache")
    assert cache.convention.startswith("kept in float8_e4m3fn with a scale")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("write_scale", "declared"),
    [
        (SCALE, {}),
        (SCALE, {"cache_dtype": "float8_e4m3fn"}),
        (SCALE, {"cache_dtype": "float8_e4m3fn", "cache_scale": 0.05}),
        (SCALE, {"cache_dtype": "float8_e5m2", "cache_scale": SCALE}),
        (1.0, {"cache_dtype": "float8_e4m3fn", "cache_scale": SCALE}),
    ],
)
def test_a_cache_of_another_format_is_a_mismatch(float8_engine, checkpoints, write_scale, declared):
    (run,) = check(float8_engine(write_scale, **declared), checkpoints, [SHARED]).runs
    assert {"model.layers.0.k_cache", "model.layers.0.v_cache"} <= {finding.tap for finding in run.findings}
    assert {finding.code for finding in run.findings} >= {Code.CACHE_DIFFERS}


CACHES = tuple(f"model.layers.{layer}.{part}_cache" for layer in (0, 1) for part in "kv")
GRAPH = Graph([Operation(tap=tap, kind=Kind.CACHE) for tap in CACHES])


class Subject:
    def __init__(self, **declared):
        vars(self).update(declared)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, None),
        ({"cache_dtype": "auto"}, None),
        ({"cache_dtype": torch.bfloat16}, Numerics(cache="bfloat16")),
        (
            {"cache_dtype": "int8", "cache_scale": (0.5, 0.25)},
            Numerics(cache="int8", cache_scales=dict.fromkeys(CACHES, (0.5, 0.25))),
        ),
        (
            {"numerics": Numerics(gelu="float16"), "cache_dtype": "Q8_0"},
            Numerics(gelu="float16", cache="Q8_0"),
        ),
        (
            {"cache_dtype": "int8", "cache_scale": {CACHES[0]: [2.0]}},
            Numerics(cache="int8", cache_scales={CACHES[0]: (2.0,)}),
        ),
    ],
)
def test_what_is_declared(declared, expected):
    assert declared_numerics(Subject(**declared), GRAPH) == expected


@pytest.mark.parametrize(
    ("declared", "where", "actual"),
    [
        ({"cache_dtype": "float7"}, "Subject: cache", "float7"),
        ({"cache_dtype": "int32"}, "Subject: cache", "int32"),
        ({"cache_dtype": "int8", "cache_scale": -1.0}, f"Subject: scales of {CACHES[0]}", [-1.0]),
        ({"cache_dtype": "int8", "cache_scale": float("nan")}, f"Subject: scales of {CACHES[0]}", None),
        ({"cache_dtype": "int8", "cache_scale": []}, f"Subject: scales of {CACHES[0]}", []),
        ({"cache_dtype": "int8", "cache_scale": "large"}, f"Subject: cache_scales.{CACHES[0]}.0", "large"),
        ({"cache_scale": 0.5}, "Subject.cache_scale", 0.5),
        ({"numerics": "float8"}, "Subject.numerics", "float8"),
        ({"numerics": {"keys": "int8"}}, "Subject: keys", "int8"),
        ({"numerics": {"gelu": "float8"}}, "Subject: gelu", "float8"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declared, where, actual):
    with pytest.raises(HarnessError, match="declares arithmetic that does not exist") as caught:
        declared_numerics(Subject(**declared), GRAPH)
    assert (caught.value.code, caught.value.where) == (Code.BAD_OPTION, where)
    assert actual is None or caught.value.actual == actual


def test_the_formats_that_can_be_declared_are_those_that_can_be_judged():
    assert set(CACHE_FORMATS) == {name for name in (*FORMATS, *BLOCKS, *GRIDS) if not name.startswith("float8")}


def test_a_float8_tensor_that_nothing_reads(fused_engine, checkpoints):
    engine = fused_engine()
    store = engine.model.layers[0].attn.store

    def store_and_round(part, rows, slots):
        rows.to(torch.float8_e4m3fn)
        store(part, rows, slots)

    engine.model.layers[0].attn.store = store_and_round
    check(engine, checkpoints, [SHARED]).assert_ok()
