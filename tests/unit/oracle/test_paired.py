"""The truth is HF's own forward in high precision, the control HF's own in the engine's dtype, a part at a time."""

import copy
import gc
import threading
import weakref
from collections import Counter

import pytest
import torch

from harness.errors import HarnessError
from harness.formats.taps import Kind
from harness.oracle import paired, precision
from harness.oracle.model import load_model
from harness.oracle.paired import Sample, run_pair
from harness.oracle.precision import PreservePrecision, eager_experts
from harness.oracle.watch import Seeing, as_rows, watching

from .state import bits, surroundings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("axk2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "mamba", "mixtral", "phi3", "qwen3_moe")


class BoomError(Exception):
    """Raised by the tests."""


class Notes:
    """Keeps what it is shown, and may put something else in its place."""

    def __init__(self, control=None, truth=None):
        self.order, self.values = [], {"control": {}, "truth": {}}
        self._instead = {"control": control, "truth": truth}

    def control(self, value):
        return self._note("control", value)

    def truth(self, value):
        return self._note("truth", value)

    def part_begins(self, call):
        pass

    def part_done(self):
        pass

    def _note(self, side, value):
        tap = value.operation.tap
        self.order.append((side, tap))
        self.values[side][tap] = value.rows.clone()
        return self._instead[side](value) if self._instead[side] else None


def pair(hf, token_ids, *, dtype=torch.float64, observer=None, **options):
    observer = observer or Notes()
    assert hf.graph, "traced before: see test_the_graph_is_traced_before_either_forward_begins"
    ids = torch.tensor(token_ids if isinstance(token_ids[0], list) else [token_ids])
    run_pair(hf, ids, observer, truth_dtype=dtype, **options)
    return observer


def plain_forward(hf, model, token_ids):
    """Rows of every tap of a forward that the oracle has no part in but for looking at it."""
    taps, operations = {}, hf.graph.by_source
    plain = type(hf)(model=model, checkpoint=hf.checkpoint, dtype=hf.dtype, device=hf.device)

    def sink(source, value):
        operation = operations.get(source)
        if operation is not None:
            taps[operation.tap] = as_rows(value, operation.token_dim, 1, len(token_ids)).clone()

    with torch.no_grad(), eager_experts(model.config), watching(plain) as watch, watch.showing(Seeing(sink)):
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    if hf.graph.logits not in taps:
        taps[hf.graph.logits] = logits[0].clone()
    return taps


def whole_model_in(dtype, hf, token_ids):
    """The plain way: the whole model upcast at once. Its rotary frequencies are float32 by HF's definition."""
    model = copy.deepcopy(hf.model)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(dtype)
    for name, buffer in kept.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffer)
    with PreservePrecision(dtype):
        return plain_forward(hf, model, token_ids)


def relative(actual, expected):
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm()) if bool((actual != expected).any()) else 0.0


def computed(graph):
    return {op.tap for op in graph if not op.is_kept}


def choices_of(graph, taps):
    """The taps as the graph has them: where an indexer takes a token after the row's own, there is no choice."""
    choices = dict(taps)
    for tap in (tap for tap in taps if tap.endswith("indexer.topk") and graph[tap].kind is Kind.CHOICE):
        rows = torch.arange(len(choices[tap]))[:, None]
        choices[tap] = choices[tap].where(choices[tap] <= rows, -1)
    return choices


def assert_is_the_whole_model_in_double(hf, token_ids):
    actual, expected = pair(hf, token_ids).values["truth"], whole_model_in(torch.float64, hf, token_ids)
    expected = choices_of(hf.graph, expected)
    assert actual.keys() == expected.keys() == computed(hf.graph)
    for tap in actual:
        if hf.graph[tap].kind is not Kind.CHOICE:
            assert actual[tap].dtype == torch.float64, tap
        assert actual[tap].shape == expected[tap].shape, tap
        assert relative(actual[tap], expected[tap]) < 1e-12, tap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_truth_is_the_whole_model_in_double(load, token_ids, name, dtype):
    assert_is_the_whole_model_in_double(load(name, dtype), token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_truth_of_other_families_is_the_whole_model_in_double(tiny, family):
    assert_is_the_whole_model_in_double(tiny(family, torch.bfloat16), list(range(3, 20)))


def test_truth_is_not_a_rounded_forward(load, token_ids):
    """Taps hold more than float32 can: nothing on the way was rounded to it."""
    taps = pair(load("qwen3-tiny"), token_ids).values["truth"]
    rounded = [tap for tap, x in taps.items() if torch.equal(x, x.float().double())]
    assert rounded == ["model.embed_tokens"], "a row of the embedding is the weight itself"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truth_in_float32_is_the_whole_model_in_float32(load, token_ids, dtype):
    """And so hundreds of times nearer to the truth in float64 than the engine's dtype can be."""
    hf = load("qwen3-tiny", dtype)
    values = pair(hf, token_ids, dtype=torch.float32).values
    whole, exact = whole_model_in(torch.float32, hf, token_ids), pair(hf, token_ids).values["truth"]
    for tap, rows in values["truth"].items():
        assert rows.dtype == torch.float32, tap
        assert relative(rows, whole[tap]) < 1e-5, tap
        assert relative(rows, exact[tap]) < 1e-5, tap
    logits = (relative(values[side]["lm_head"], exact["lm_head"]) for side in ("truth", "control"))
    assert next(logits) * 300 < next(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_control_is_bit_for_bit_hf_in_the_engines_dtype(load, token_ids, name, dtype):
    hf = load(name, dtype)
    control, plain = pair(hf, token_ids).values["control"], plain_forward(hf, hf.model, token_ids)
    assert control.keys() == plain.keys() == computed(hf.graph)
    assert [tap for tap in plain if not torch.equal(control[tap], plain[tap])] == []
    assert {rows.dtype for rows in control.values()} == {dtype}


@pytest.mark.parametrize("family", FAMILIES)
def test_control_of_other_families_is_bit_for_bit_hf_in_the_engines_dtype(tiny, family):
    hf, token_ids = tiny(family, torch.bfloat16), list(range(3, 20))
    control, plain = pair(hf, token_ids).values["control"], plain_forward(hf, hf.model, token_ids)
    plain = choices_of(hf.graph, plain)
    assert control.keys() == plain.keys() == computed(hf.graph)
    assert [tap for tap in plain if not torch.equal(control[tap], plain[tap])] == []


def test_a_state_that_a_module_keeps_as_an_attribute_is_each_forwards_own(tiny, monkeypatch):
    """A recurrence of RecurrentGemma begins with what its module holds: of the truth, it would be in another dtype."""
    hf, token_ids, dtypes = tiny("recurrent_gemma"), list(range(3, 20)), set()
    recurrence = next(type(module) for module in hf.model.modules() if hasattr(module, "recurrent_states"))
    scan = recurrence._rnn_scan

    def noted(self, **inputs):
        if inputs["recurrent_states"] is not None:
            dtypes.add((inputs["hidden_states"].dtype, inputs["recurrent_states"].dtype))
        return scan(self, **inputs)

    monkeypatch.setattr(recurrence, "_rnn_scan", noted)
    control, plain = pair(hf, token_ids).values["control"], plain_forward(hf, hf.model, token_ids)
    assert (torch.float32, torch.float64) not in dtypes
    assert [tap for tap in plain if not torch.equal(control[tap], plain[tap])] == []


def test_both_see_every_operation_once_and_in_turn(hf, token_ids):
    """The control's value of one operation is all that waits for the truth's."""
    taps = [op.tap for op in hf.graph if op.kind is not Kind.CACHE]
    assert pair(hf, token_ids).order == [(side, tap) for tap in taps for side in ("control", "truth")]


def test_the_graph_is_traced_before_either_forward_begins(checkpoints, monkeypatch):
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32)

    class Checked(paired.Ahead):
        def advance(self):
            assert "graph" in vars(hf)
            super().advance()

    monkeypatch.setattr(paired, "Ahead", Checked)
    run_pair(hf, torch.tensor([[3, 4, 5]]), Notes(), truth_dtype=torch.float64)


def test_attention_comes_with_what_it_read(load, token_ids):
    calls = {}

    def look(value):
        calls[value.operation.tap] = value.call

    hf = load("qwen3-tiny", torch.bfloat16)
    observer = Notes(truth=look)
    pair(hf, token_ids, observer=observer)
    assert {tap for tap, call in calls.items() if call is not None} == {
        op.tap for op in hf.graph if op.kind is Kind.ATTENTION
    }
    call = calls["model.layers.1.attention"]
    assert call.query.dtype == torch.float64
    assert call.key.shape == (1, 2, 23, hf.head_dim)
    keys = observer.values["truth"]["model.layers.1.k_rope"]
    assert torch.equal(call.key[0].transpose(0, 1), keys)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny"])
def test_only_the_wanted_logits(load, token_ids, name):
    hf, positions = load(name), [3, 20, 22]
    everything = pair(hf, token_ids).values["truth"]
    places = {}
    observer = Notes(truth=lambda value: places.__setitem__(value.operation.tap, value.places))
    wanted = pair(hf, token_ids, observer=observer, logit_positions=positions).values["truth"]
    torch.testing.assert_close(wanted["lm_head"], everything["lm_head"][positions], rtol=1e-13, atol=1e-13)
    assert places.pop("lm_head").tolist() == positions
    assert set(places.values()) == {None}
    torch.testing.assert_close(wanted["model.norm"], everything["model.norm"], rtol=1e-13, atol=1e-13)


def test_logits_behind_the_head_are_a_tap_of_their_own(tiny):
    hf, positions = tiny("gemma2"), [1, 4]
    truth = pair(hf, [3, 9, 5, 7, 30], logit_positions=positions).values["truth"]
    cap = hf.config.final_logit_softcapping
    torch.testing.assert_close(truth["logits"], cap * torch.tanh(truth["lm_head"] / cap), rtol=1e-12, atol=1e-12)


def test_requests_of_a_batch_do_not_see_each_other(load, token_ids):
    """Nor the padding after the end of the shorter ones."""
    hf, short = load("qwen3-tiny"), token_ids[5:14]
    together = pair(hf, [token_ids, short + [0] * 14]).values["truth"]
    for begin, tokens in ((0, token_ids), (23, short)):
        alone = pair(hf, tokens).values["truth"]
        for tap, rows in alone.items():
            torch.testing.assert_close(together[tap][begin : begin + len(tokens)], rows, rtol=1e-9, atol=1e-12)


# What an observer puts in the place of a value.


@pytest.mark.parametrize("side", ["control", "truth"])
@pytest.mark.parametrize(
    "tap",
    [
        "model.embed_tokens",
        "model.layers.0.output",
        "model.layers.1.attn_residual",
        "model.layers.1.q_rope",
        "model.layers.1.k_rope",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.attention",
        "model.layers.1.mlp.act",
        "model.norm",
    ],
)
def test_each_forward_goes_on_with_its_own_value(load, token_ids, side, tap):
    hf = load("llama-tiny")
    plain = pair(hf, token_ids)

    def instead(value):
        return value.rows.flip(0) if value.operation.tap == tap else None

    changed = pair(hf, token_ids, observer=Notes(**{side: instead}))
    rival = "truth" if side == "control" else "control"
    assert all(torch.equal(changed.values[rival][key], rows) for key, rows in plain.values[rival].items())
    moved = {key for key, rows in plain.values[side].items() if not torch.equal(changed.values[side][key], rows)}
    readers = {op.tap for op in hf.graph if tap in op.inputs and op.kind is not Kind.CACHE}
    order = [op.tap for op in hf.graph]
    assert readers <= moved
    assert all(order.index(item) > order.index(tap) for item in moved)


@pytest.mark.parametrize("is_part", [False, True])
def test_what_is_put_back_in_another_dtype_has_that_of_the_forward(is_part):
    """Whether it is written into the forward's tensor, or that is a part of another."""
    value = torch.zeros(4, 3, dtype=torch.float64)[: 2 if is_part else 4]
    recorded = torch.randn(len(value), 3).to(torch.bfloat16)
    actual = paired._replaced(value, recorded)
    assert actual.dtype == torch.float64
    assert torch.equal(actual, recorded.double())
    assert (actual is value) != is_part


def test_a_residual_that_is_put_back_is_read_by_the_norm_and_by_the_sum(load, token_ids):
    """Only the norm's input is shown, the sum reads the same tensor two lines further on."""
    hf, prefix = load("qwen3-tiny"), "model.layers.1."
    residual = torch.randn(23, hf.config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = pair(
        hf,
        token_ids,
        observer=Notes(truth=lambda value: residual if value.operation.tap == f"{prefix}attn_residual" else None),
    ).values["truth"]
    torch.testing.assert_close(truth[f"{prefix}output"], residual + truth[f"{prefix}mlp.down_proj"], rtol=1e-14, atol=0)
    norm = hf.module(f"{prefix}post_attention_layernorm")
    root = (residual.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    torch.testing.assert_close(
        truth[f"{prefix}post_attention_layernorm"], residual / root * norm.weight.double(), rtol=1e-13, atol=0
    )


def test_a_history_with_a_hole_spoils_the_rows_that_see_it_and_no_other(load, token_ids):
    """Weight zero times NaN is NaN: what no row sees must not be read."""
    hf = load("llama-tiny")

    def poison(value):
        if value.operation.tap != "model.layers.0.k_rope":
            return None
        rows = value.rows.clone()
        rows[17] = torch.nan
        return rows

    ids = [token_ids, token_ids[::-1]]
    plain, spoilt = (pair(hf, ids, observer=Notes(truth=item)).values["truth"] for item in (None, poison))
    finite = spoilt["model.layers.0.attention"].isfinite().flatten(1).all(dim=1)
    assert finite.tolist() == [place < 17 or place >= 23 for place in range(46)]
    name = "model.layers.2.output"
    torch.testing.assert_close(spoilt[name][finite], plain[name][finite], rtol=1e-12, atol=1e-12)


# What is left behind.


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_left_behind(load, token_ids, dtype):
    hf = load("qwen3-tiny", dtype)
    before, weights = surroundings(hf), bits(hf.model)
    pair(hf, token_ids)
    assert surroundings(hf) == before
    assert bits(hf.model) == weights
    assert hf.model.lm_head.weight is hf.model.model.embed_tokens.weight, "the tying stays"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_nothing_is_left_behind_of_a_model_with_experts(tiny, family):
    hf = tiny(family, torch.bfloat16)
    before, weights = surroundings(hf), bits(hf.model)
    pair(hf, [3, 4, 5])
    assert surroundings(hf) == before
    assert bits(hf.model) == weights


@pytest.mark.parametrize("side", ["control", "truth"])
@pytest.mark.parametrize(
    "tap", ["model.embed_tokens", "model.layers.1.q_rope", "model.layers.1.mlp.act", "model.layers.0.output", "lm_head"]
)
def test_nothing_is_left_behind_when_the_observer_raises(load, token_ids, side, tap):
    hf = load("llama-tiny", torch.bfloat16)
    before, weights = surroundings(hf), bits(hf.model)

    def explode(value):
        if value.operation.tap == tap:
            raise BoomError

    with pytest.raises(BoomError):
        pair(hf, token_ids, observer=Notes(**{side: explode}))
    assert surroundings(hf) == before
    assert bits(hf.model) == weights
    assert not [thread for thread in threading.enumerate() if thread.name == "control"]


def test_nothing_is_left_behind_when_the_model_raises(load, token_ids):
    hf = load("llama-tiny", torch.bfloat16)
    before, weights = surroundings(hf), bits(hf.model)
    with pytest.raises(HarnessError) as caught:
        pair(hf, [5, 999])
    assert isinstance(caught.value.__cause__, IndexError)
    assert surroundings(hf) == before
    assert bits(hf.model) == weights


def test_tf32_is_off_while_it_runs(load, token_ids):
    switch, seen = torch.backends.cuda.matmul, []
    before = switch.allow_tf32
    try:
        switch.allow_tf32 = True
        look = lambda _value: seen.append(switch.allow_tf32)  # noqa: E731
        pair(load("llama-tiny"), token_ids, observer=Notes(control=look, truth=look))
        assert switch.allow_tf32
    finally:
        switch.allow_tf32 = before
    assert set(seen) == {False}


def test_no_more_than_one_layer_is_upcast_at_a_time(load, token_ids):
    hf = load("llama-tiny", torch.bfloat16)
    layers = [hf.module(part) for part in hf.parts if ".layers." in part]
    layer_bytes = max(sum(p.numel() for p in layer.parameters()) for layer in layers) * 8
    held = {"control": [], "truth": []}

    def look(side):
        def note(_value):
            alive = [p for p in hf.model.parameters() if p.dtype == torch.float64]
            held[side].append(sum(p.numel() for p in alive) * 8)

        return note

    pair(hf, token_ids, observer=Notes(control=look("control"), truth=look("truth")))
    head_bytes = max(p.numel() for p in hf.model.lm_head.parameters()) * 8
    assert max(held["truth"]) == max(layer_bytes, head_bytes)
    assert set(held["control"]) == {0}, "the control runs before anything of its part is upcast"


def test_large_matrices_are_never_upcast_as_a_whole(load, token_ids, monkeypatch):
    hf = load("llama-tiny", torch.bfloat16)
    expected = pair(hf, token_ids).values
    monkeypatch.setattr(precision, "_BLOCK_BYTES", 8 * 1000)
    monkeypatch.setattr(precision, "_LARGE_BYTES", 8 * 1000)
    dtypes = {}

    def look(value):
        if value.operation.source == value.operation.module:
            dtypes[value.operation.tap] = {x.dtype for x in hf.module(value.operation.module).parameters(recurse=False)}

    actual = pair(hf, token_ids, observer=Notes(truth=look)).values
    for tap in expected["truth"]:
        assert relative(actual["truth"][tap], expected["truth"][tap]) < 1e-13, tap
        assert torch.equal(actual["control"][tap], expected["control"][tap]), tap
    assert dtypes["model.layers.1.input_layernorm"] == {torch.float64}
    large = ("model.embed_tokens", "lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj")
    assert set().union(*(dtypes[tap] for tap in large)) == {torch.bfloat16}


def test_what_is_upcast_is_freed(load, token_ids):
    """Not only put back: there is memory for the float64 weights of one part, whichever runs, and none afterwards."""
    hf, made, alive = load("llama-tiny", torch.bfloat16), {}, []
    needed = Counter()
    for part in hf.parts:
        needed |= Counter(p.shape for p in hf.module(part).parameters())
    layers = [part for part in hf.parts if ".layers." in part]

    def look(_value):
        high = [p for p in hf.model.parameters() if p.dtype == torch.float64]
        made.update({p.data_ptr(): weakref.ref(p.untyped_storage()) for p in high})
        alive.append(sum(x().nbytes() for x in made.values() if x() is not None))

    pair(hf, token_ids, observer=Notes(truth=look))
    assert len(layers) > 1
    assert 0 < max(alive) <= sum(shape.numel() * number for shape, number in needed.items()) * 8
    assert [x for x in made.values() if x() is not None] == []


def test_every_layer_is_upcast_into_the_same_memory(load, token_ids):
    """A layer's is kept for the next one: fresh memory would be cleared page by page."""
    hf, first, is_kept = load("llama-tiny", torch.bfloat16), [], []

    def look(value):
        if value.operation.layer is None:
            return
        storages = {p.untyped_storage() for p in hf.module(hf.part_of(value.operation.module)).parameters()}
        if not first:
            first.extend(weakref.ref(storage) for storage in storages)
        is_kept.append({storage() for storage in first} == storages)

    pair(hf, token_ids, observer=Notes(truth=look))
    assert set(is_kept) == {True}


@pytest.mark.parametrize("side", ["control", "truth"])
def test_what_is_upcast_is_freed_when_the_observer_raises(load, token_ids, side):
    hf, made = load("llama-tiny", torch.bfloat16), []

    def note(_value):
        made.extend(weakref.ref(p.untyped_storage()) for p in hf.model.parameters() if p.dtype == torch.float64)

    def explode(value):
        note(value)
        if value.operation.tap == "model.layers.1.mlp.act":
            raise BoomError

    with pytest.raises(BoomError):
        pair(hf, token_ids, observer=Notes(**{"truth": note, side: explode}))
    gc.collect()  # the error, the thread that raised it and its frames refer to each other
    assert made
    assert [x for x in made if x() is not None] == []


def test_values_of_parts_that_have_run_are_freed(load, token_ids):
    """Both forwards hold the activations of one part."""
    hf, made = load("llama-tiny"), {}

    def look(value):
        layer = value.operation.layer
        if value.operation.site == "mlp.act":
            made.setdefault(layer, []).append(weakref.ref(value.rows.untyped_storage()))
            assert all(x() is None for earlier in made if earlier != layer for x in made[earlier])

    class Looking(Notes):
        def _note(self, _side, value):
            look(value)

    pair(hf, token_ids, observer=Looking())
    assert {layer: len(rows) for layer, rows in made.items()} == {0: 2, 1: 2, 2: 2}


def test_progress_counts_the_parts_of_the_model(load, token_ids):
    hf, said = load("llama-tiny"), []
    pair(hf, token_ids, progress=lambda done, total: said.append((done, total)))
    assert hf.parts == (
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb",
        "lm_head",
    )  # fmt: skip
    assert [done for done, _ in said] == list(range(1, len(hf.parts) + 1))
    assert {total for _, total in said} == {len(hf.parts)}


# Products and attention at some positions alone.


class Recorded(Notes):
    """Puts rows of an earlier run in the place of every value, as a replay does."""

    def __init__(self, earlier, sample, num_tokens):
        super().__init__(*(self._rows_of(earlier.values[side], sample) for side in ("control", "truth")))
        self.places, self._num_tokens = {}, num_tokens

    def _rows_of(self, values, sample):
        def instead(value):
            tap = value.operation.tap
            self.places[tap] = value.places
            if value.places is not None and tap in sample.taps:
                positions = (value.places % self._num_tokens).unique()
                assert positions.tolist() == sample.positions.tolist()
            return values[tap]

        return instead


SAMPLED = (*FAMILIES, "falcon_h1", "llama4_text", "recurrent_gemma")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SAMPLED)
def test_a_sample_has_the_rows_that_all_of_it_has(tiny, family, dtype):
    """Of attention, too, whose rows see what they saw; what nothing computed is what the observer gave."""
    hf, lines = tiny(family, dtype), [list(range(3, 20)), list(range(40, 57))]
    whole = pair(hf, lines)
    dear = frozenset(
        op.tap for op in hf.graph
        if op.kind in (Kind.LINEAR, Kind.ATTENTION) and op.tap not in hf.graph.head
    )  # fmt: skip
    sample = Sample(positions=torch.tensor([0, 5, 6, 16]), taps=dear)
    observer = Recorded(whole, sample, len(lines[0]))
    sampled = pair(hf, lines, observer=observer, sample=sample)
    narrowed = {tap for tap, places in observer.places.items() if places is not None}
    assert narrowed, "there are some"
    assert {op.tap for op in hf.graph if op.kind is Kind.ATTENTION} <= narrowed <= dear
    linear = {tap for tap in dear if type(hf.module(hf.graph[tap].module)) is torch.nn.Linear}
    latent = {tap for tap in linear if tap.endswith("kv_b_proj")}
    assert linear - narrowed <= latent, "which has heads before tokens"
    for tap in sampled.values["truth"]:
        places = observer.places[tap]
        for side, least in (("truth", 1e-11), ("control", 8 * torch.finfo(dtype).eps)):
            rows, expected = sampled.values[side][tap], whole.values[side][tap]
            assert relative(rows, expected if places is None else expected[places]) < least, (side, tap)


def test_what_a_sample_left_out_has_to_be_given(load, token_ids):
    hf, sample = load("llama-tiny"), Sample(positions=torch.tensor([3]), taps={"model.layers.0.mlp.up_proj"})
    with pytest.raises(AssertionError, match="up_proj was to be replaced"):
        pair(hf, token_ids, sample=sample)


def test_a_module_is_computed_whole_where_one_of_its_outputs_is_no_tap_of_the_sample(load, token_ids):
    """And so is all that is no linear module."""
    hf, places = load("llama-tiny"), {}
    sample = Sample(positions=torch.tensor([3, 9]), taps={"model.layers.0.input_layernorm", "model.layers.0.output"})
    pair(hf, token_ids, observer=Notes(truth=lambda value: places.__setitem__(value.operation.tap, value.places)),
         sample=sample)  # fmt: skip
    assert set(places.values()) == {None}


@pytest.mark.parametrize("at", [2, 9])
def test_a_hole_spoils_a_sample_behind_it(load, token_ids, at):
    hf = load("llama-tiny")
    sample = Sample(positions=torch.tensor([1, 5, 20]), taps={"model.layers.0.attention"})

    def poisoned(value):
        if value.operation.tap == "model.layers.0.attention":
            contexts.append(value.rows.isfinite().flatten(1).all(dim=1).tolist())
            return value.rows.new_zeros(23, *value.rows.shape[1:])
        if value.operation.tap == "model.layers.0.k_rope":
            return value.rows.index_fill(0, torch.tensor([at]), torch.nan)
        return None

    contexts = []
    pair(hf, token_ids, observer=Notes(truth=poisoned, control=poisoned), sample=sample)
    assert contexts == [[True, at > 5, False]] * 2
