"""HF as an engine: every row once, padding dropped, and its own tokens those of `generate`."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.engines.hf import open_engine
from harness.errors import Code, HarnessError
from harness.formats.recording.manifest import RequestInfo
from harness.formats.taps import graph_of_taps
from harness.oracle.decode import greedy_continuation
from harness.oracle.model import load_model
from harness.oracle.watch import Seeing, as_rows, watching

from ..tiny_models import WINDOW
from .conftest import REQUESTS, computed, rows

SCHEDULES = ["plain", "chunked:3", "chunked:100", "batched"]


@pytest.fixture(scope="module")
def engines(checkpoints):
    folder = checkpoints / "llama-tiny"
    return {
        attention: open_engine(folder, dtype="float32", device="cpu", options={"attention": attention})
        for attention in ("sdpa", "eager")
    }


@pytest.fixture(scope="module")
def model(checkpoints):
    return AutoModelForCausalLM.from_pretrained(checkpoints / "llama-tiny", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Return two taps of every row, each request computed by one forward of its own: by request id, by tap."""
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    kept, operations = {request.id: {} for request in REQUESTS}, hf.graph.by_source
    for request in REQUESTS:

        def keep(source, value, rows=kept[request.id], tokens=request.token_ids):
            if source in operations:
                operation = operations[source]
                rows[operation.tap] = as_rows(value, operation.token_dim, 1, len(tokens)).clone()

        with watching(hf) as watch, watch.showing(Seeing(keep)), torch.no_grad():
            hf.model(input_ids=torch.tensor([request.token_ids]), use_cache=False)
    return kept


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_position_is_recorded_once_with_its_own_values(engines, expected, record, schedule, attention):
    with record(engines[attention], schedule) as recording:
        for tap in ("model.layers.0.k_rope", "model.layers.2.output"):  # the one has the position, the other all of it
            seen = Counter()
            for step in computed(recording):
                for row, values in zip(rows(step, tap), step.tap(tap), strict=True):
                    seen[row] += 1
                    torch.testing.assert_close(values, expected[row[0]][tap][row[1]], rtol=2e-4, atol=2e-4)
            assert seen == Counter({(request.id, at) for request in REQUESTS for at in range(len(request.token_ids))})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_samples_after_the_prompt_and_after_every_token_of_the_continuation(engines, model, record, schedule):
    with record(engines["sdpa"], schedule) as recording:
        chosen = {}
        for step in computed(recording):
            sampled = [-1] * len(step.request) if step.sampled is None else step.sampled.tolist()
            pairs = list(zip(step.request.tolist(), step.position.tolist(), strict=True))
            at = [pair for pair, token in zip(pairs, sampled, strict=True) if token >= 0]
            assert ("lm_head" in step.tap_names) == bool(at)
            if at:
                assert rows(step, "lm_head") == at
                chosen |= {pair: token for pair, token in zip(pairs, sampled, strict=True) if token >= 0}
    expected = {}
    for request in REQUESTS:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.token_ids]), use_cache=False).logits[0]
        expected |= {
            (request.id, at): int(logits[at].argmax())
            for at in range(request.prompt_length - 1, len(request.token_ids))
        }
    assert chosen == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_reads_back_its_cache_without_the_padding(engines, record, schedule):
    with record(engines["sdpa"], schedule) as recording:
        written, read = {}, {}
        for step in recording.steps:
            source, target = ("k_cache", read) if step.phase == "readback" else ("k_rope", written)
            for layer in range(3):
                tap = f"model.layers.{layer}.{source}"
                for row, values in zip(rows(step, tap), step.tap(tap).flatten(1), strict=True):
                    assert (layer, row) not in target
                    target[layer, row] = values.tolist()
        assert read == written
        assert len(read) == 3 * sum(len(request.token_ids) for request in REQUESTS)


def test_phases_are_named_for_what_they_compute(engines, record):
    with record(engines["sdpa"], "plain") as recording:
        phases = [step.phase for step in recording.steps]
    first = ["prefill", "decode", "decode", "readback"]
    assert phases == [*first, "prefill", *["decode"] * 4, "readback", "prefill", "readback"]


def test_chunks_are_as_long_as_the_schedule_says(engines, record):
    with record(engines["sdpa"], "chunked:3", REQUESTS[:1]) as recording:
        assert [len(step.request) for step in computed(recording)] == [3, 3, 2, 1, 1]


def test_its_own_tokens_are_those_of_generate(engines, checkpoints, model, record):
    """The loop is closed: the golden's continuation is `generate`'s, and so are the engine's choices when fed it."""
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    prompts = [[1, 4, 5, 6, 7, 8], [1, 20]]
    requests = []
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            generated = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )[0].tolist()
        assert greedy_continuation(hf, prompt, 8) == generated[len(prompt) :]
        requests.append(RequestInfo(id=index, token_ids=generated[:-1], prompt_length=len(prompt)))
        with record(engines["sdpa"], "plain", [requests[-1]]) as recording:
            chosen = [token for step in computed(recording) for token in step.sampled.tolist() if token >= 0]
        assert chosen == generated[len(prompt) :]
        recording_folder = recording.path
        for file in recording_folder.iterdir():
            file.unlink()


@pytest.mark.parametrize("options", [{"attention": "flash"}, {"attn": "sdpa"}])
def test_an_option_it_does_not_have(checkpoints, options):
    with pytest.raises(HarnessError) as caught:
        open_engine(checkpoints / "llama-tiny", dtype="float32", device="cpu", options=options)
    assert caught.value.code is Code.BAD_OPTION


def test_the_model_is_as_before_after_a_run_that_failed(engines, record):
    class BrokenError(Exception):
        pass

    engine = engines["sdpa"]
    before = engine._hf.config._attn_implementation
    original, engine._hf.model.model.norm.forward = engine._hf.model.model.norm.forward, None

    def fail(_hidden):
        raise BrokenError

    engine._hf.model.model.norm.forward = fail
    try:
        with pytest.raises(BrokenError):
            record(engine, "plain")
    finally:
        engine._hf.model.model.norm.forward = original
    assert engine._hf.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine._hf.model.modules())


# Other families than Llama-like ones.


def of(folder, dtype="float32", **options):
    return open_engine(folder, dtype=dtype, device="cpu", options=options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_cache_with_a_window_is_read_back_as_far_as_it_is_kept(tiny_folder, record, family, schedule):
    """HF keeps one row less than the window: what no later token will see is dropped. Of a batch it keeps columns."""
    engine = of(tiny_folder(family))
    windows = {op.tap: op.window for op in engine._hf.graph if op.tap.endswith(("k_cache", "v_cache"))}
    assert WINDOW in windows.values()
    with record(engine, schedule) as recording:
        written = {}
        for step in computed(recording):
            for tap in ("k_rope", "self_attn.v_proj"):
                for layer in range(2):
                    name = f"model.layers.{layer}.{tap}"
                    for row, values in zip(rows(step, name), step.tap(name).flatten(1), strict=True):
                        written[layer, tap, row] = values.tolist()
        seen = {tap: set() for tap in windows}
        for step in (step for step in recording.steps if step.phase == "readback"):
            for tap in windows:
                source = "k_rope" if tap.endswith("k_cache") else "self_attn.v_proj"
                layer = int(tap.split(".")[2])
                for row, values in zip(rows(step, tap), step.tap(tap).flatten(1), strict=True):
                    assert values.tolist() == written[layer, source, row]
                    seen[tap].add(row)
    for tap, window in windows.items():
        everything = {(request.id, at) for request in REQUESTS for at in range(len(request.token_ids))}
        ends_last = [0] if schedule == "batched" else [request.id for request in REQUESTS]
        lengths = {request.id: len(request.token_ids) for request in REQUESTS}
        needed = {(request, at) for request, at in everything if window is None or at > lengths[request] - window}
        assert {row for row in needed if row[0] in ends_last} <= seen[tap] <= everything
        if window is None:
            assert seen[tap] == everything
        elif schedule != "batched":
            assert seen[tap] == needed


@pytest.mark.parametrize("family", ["gpt_oss", "mamba"])
def test_a_family_without_sdpa_runs_by_its_own_attention(tiny_folder, record, family):
    with record(of(tiny_folder(family)), "plain") as recording:
        there = {tap for step in computed(recording) for tap in step.tap_names}
    assert {tap for tap in there if tap.endswith((".attention", "mixer.out_proj"))}


@pytest.mark.parametrize(
    ("family", "tap"), [("mamba", "backbone.layers.1.mixer.out_proj"), ("gptj", "transformer.h.1.attn.out_proj")]
)
def test_nothing_sees_padding(tiny_folder, record, family, tap):
    """Of a state a mask is of the new rows alone; of attention it is of all, also where HF does not show it as such."""
    engine = of(tiny_folder(family))
    alone = rows_alone(engine._hf, tap)
    with record(engine, "batched") as recording:
        differing = {
            row: values
            for step in computed(recording)
            for row, values in zip(rows(step, tap), step.tap(tap), strict=True)
        }
    engine._hf.model.double()
    exact = rows_alone(engine._hf, tap)
    noise = max(float((alone[row] - exact[row]).abs().max()) for row in exact)
    assert differing.keys() == exact.keys()
    for row, values in differing.items():
        assert float((values - exact[row]).abs().max()) <= 16 * noise  # padding would be as large as the row
    assert 100 * noise < min(float(values.abs().max()) for values in exact.values())


def rows_alone(hf, tap):
    """Rows of a tap by request and position, each request for itself."""
    rows = {}
    for request in REQUESTS:
        shown = []
        hook = hf.module(tap).register_forward_hook(lambda _module, _args, out, shown=shown: shown.append(out))
        hf.model(torch.tensor([request.token_ids]), use_cache=False)
        hook.remove()
        rows |= {(request.id, at): row for at, row in enumerate(shown[0][0])}
    return rows


def test_requests_that_hf_cannot_mask_run_one_by_one(tiny_folder, record):
    """HF's RWKV takes a mask and ignores it: a state would read the padding."""
    with record(of(tiny_folder("rwkv")), "batched") as recording:
        assert all(len(set(step.request.tolist())) == 1 for step in computed(recording))


def test_states_are_read_back_after_every_step(tiny_folder, record):
    engine = of(tiny_folder("mamba"))
    with record(engine, "plain", REQUESTS[:1]) as recording:
        steps = [step for step in recording.steps if step.phase == "readback"]
        assert [(step.request.tolist(), step.position.tolist()) for step in steps] == [([3], [at]) for at in (7, 8, 9)]
        taps = {f"backbone.layers.{layer}.{name}_state" for layer in (0, 1) for name in ("conv", "recurrent")}
        assert all(set(step.tap_names) == taps for step in steps)
    assert engine.capabilities.unsupported_taps == ()


def test_choices_of_a_router_are_recorded_as_indices(tiny_folder, record):
    with record(of(tiny_folder("qwen3_moe")), "batched") as recording:
        for step in computed(recording):
            chosen = step.tap("model.layers.1.mlp.gate.topk")
            assert chosen.dtype == torch.int64
            assert chosen.shape == (len(step.request), 2)


def test_a_large_checkpoint_is_loaded_whole(checkpoints, monkeypatch):
    """Weights that are read anew for every token would be read a thousand times."""
    monkeypatch.setattr("harness.oracle.model._RESIDENT_BYTES", 0)
    engine = of(checkpoints / "llama-tiny")
    assert not [x for x in engine._hf.model.parameters() if x.is_meta]


def test_the_oracles_graph_is_not_traced_again(checkpoints, record, monkeypatch):
    folder = checkpoints / "llama-tiny"
    graph = load_model(folder, dtype=torch.float32).graph
    engine = open_engine(folder, dtype="float32", device="cpu", options={})
    traced = []
    monkeypatch.setattr("harness.oracle.graph.trace_graph", lambda hf: traced.append(hf) or graph)
    engine.match_taps(graph)
    assert {tap.name for tap in record(engine, "plain").taps} >= {
        operation.tap for operation in graph if operation.source
    }
    assert traced == []
    engine.match_taps(graph_of_taps(["model.embed_tokens"]))
    assert engine.sources, "an old golden's graph names no places: the one at hand stays"
