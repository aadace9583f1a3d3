"""Products held to projections: the law of the estimate, and the judgements of rows that are all multiplied out."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base.metrics import rounding_unit
from harness.engines import open_engine
from harness.extensions.faults.zoo.lively import make_lively
from harness.formats.recording import Recording, RequestInfo
from harness.judge.compare import local, projected
from harness.judge.compare.batch import PaddedBatch
from harness.judge.compare.local import local_errors
from harness.judge.compare.projected import (
    EXACT_ROWS,
    FAR,
    LEAST_WIDTH,
    NUM_DIRECTIONS,
    VERIFYING_ROWS,
    _projected,
    exact_places,
)
from harness.judge.compare.seen import SeenRows
from harness.judge.compare.sequences import RowSequence, sequences
from harness.judge.compare.systematic import MIN_ROWS, THRESHOLD
from harness.oracle.model import load_model

from ....recording_writer import record
from .recordings import Copy

NUM_TOKENS = 250
GATE, NORM = "model.layers.0.mlp.gate_proj", "model.layers.0.post_attention_layernorm"
LINEAR = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder with one layer that is wide enough to be projected."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", hidden_size=640, intermediate_size=768, num_hidden_layers=1, num_attention_heads=10,
        num_key_value_heads=2, head_dim=64, vocab_size=300, attention_bias=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lively(model, seed=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(wide, tmp_path_factory):
    """Return HF's model in a dtype, and a copy of what HF recorded of it."""
    made = {}

    def get(dtype):
        if dtype not in made:
            name, path = str(dtype).removeprefix("torch."), tmp_path_factory.mktemp("runs") / "run"
            ids = torch.randint(3, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
            requests = [RequestInfo(id=0, token_ids=ids, prompt_length=NUM_TOKENS - 2)]
            engine = open_engine("hf", wide, dtype=name, device="cpu", options={})
            record(engine, "plain", requests, path, dtype=name, model=str(wide))
            made[dtype] = load_model(wide, dtype=dtype), path
        hf, path = made[dtype]
        with Recording.open(path) as recording:
            return hf, Copy.of(recording)

    return get


def judged(hf, copy, path):
    recording = copy.write(path)
    recording.with_names(hf.graph.aliases)
    return local_errors(recording, hf, {op.tap for op in hf.graph} & {tap.name for tap in recording.taps})


@pytest.fixture
def judged_twice(monkeypatch, tmp_path):
    """Judge a recording by projections, and with every row multiplied out."""

    def judge(hf, copy):
        by_projections = judged(hf, copy, tmp_path / "a")
        with monkeypatch.context() as patched:
            patched.setattr(projected, "LEAST_WIDTH", 10_000)
            return by_projections, judged(hf, copy, tmp_path / "b")

    return judge


def in_order(errors):
    order = errors.rows.position.argsort()
    return errors.roundings[order], errors.bound[order]


def test_a_row_at_its_bound_escapes_once_in_a_million():
    half = torch.tensor(NUM_DIRECTIONS / 2, dtype=torch.float64)
    assert float(torch.special.gammainc(half, half * FAR**2)) < 1e-6


def test_a_sample_shows_the_least_effect_in_16_bits():
    assert 0.05 * (EXACT_ROWS * LEAST_WIDTH) ** 0.5 >= THRESHOLD
    assert EXACT_ROWS > MIN_ROWS


@pytest.mark.parametrize("kind", ["dense", "one element", "two equal elements"])
def test_the_law_of_the_estimate_is_the_same_for_any_error(kind):
    generator = torch.Generator().manual_seed(3)
    e = torch.zeros(1, 40, dtype=torch.float64)
    e[0] = torch.randn(40, generator=generator, dtype=torch.float64) if kind == "dense" else e[0]
    e[0, : {"dense": 0, "one element": 1, "two equal elements": 2}[kind]] = 1.0
    x, wu = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(NUM_DIRECTIONS, 3, dtype=torch.float64)
    u = torch.randn(2000, NUM_DIRECTIONS, 40, generator=generator, dtype=torch.float64)
    share2 = torch.cat([_projected(x, e, directions, wu, None) for directions in u]).square() / e.norm() ** 2
    assert float(share2.mean()) == pytest.approx(1, abs=0.02)
    assert float(share2.std()) == pytest.approx((2 / NUM_DIRECTIONS) ** 0.5, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_engine_is_judged_alike_and_few_rows_are_multiplied_out(run, judged_twice, dtype, monkeypatch):
    multiplied = []
    add = local.LocalJudge.add
    monkeypatch.setattr(local.LocalJudge, "add", lambda self, rows: (multiplied.append(rows), add(self, rows))[1])
    estimated, exact = judged_twice(*run(dtype))
    num_rows = {}
    for rows in multiplied:
        num_rows.setdefault(rows.operation.tap, []).append(len(rows.places))
    for tap in LINEAR:
        assert EXACT_ROWS <= num_rows[tap][0] < NUM_TOKENS / 2
        (roundings, bound), (known, known_bound) = in_order(estimated.errors[tap]), in_order(exact.errors[tap])
        assert len(roundings) == len(known) == NUM_TOKENS
        assert 0.5 < float((roundings / known).min()) < float((roundings / known).max()) < 1.5
        torch.testing.assert_close(bound, known_bound)
        assert (estimated.errors[tap].num_bad, exact.errors[tap].num_bad) == (0, 0)
    assert {tap: errors.effect for tap, errors in estimated.errors.items()} == dict.fromkeys(exact.errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_rows_are_multiplied_out(run, judged_twice, dtype):
    hf, copy = run(dtype)
    wrong, size = [20, 21, 133], {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    for position in wrong:
        copy.at(GATE, 0, position)[5] += size * copy.at(GATE, 0, position).norm()
    copy.at(GATE, 0, 200)[7] = torch.nan
    estimated, exact = (item.errors[GATE] for item in judged_twice(hf, copy))
    for errors in (estimated, exact):
        assert sorted(errors.rows.position[errors.bad].tolist()) == [*wrong, 200]
    torch.testing.assert_close(
        in_order(estimated)[0][[*wrong, 200]], in_order(exact)[0][[*wrong, 200]], rtol=1e-6, atol=0
    )


def test_rows_are_judged_though_none_of_the_sample_is(run, tmp_path, monkeypatch):
    hf, copy = run(torch.float32)
    monkeypatch.setattr(local, "exact_places", lambda batch, index, least: torch.arange(2))
    monkeypatch.setattr(local, "sequences", lambda recording: [_without_first_two(*sequences(recording))])
    copy.at(GATE, 0, 99).mul_(1.1)
    errors = judged(hf, copy, tmp_path / "a").errors[GATE]
    assert sorted(errors.rows.position.tolist()) == list(range(2, NUM_TOKENS))
    assert errors.rows.position[errors.bad].tolist() == [99]


def _without_first_two(sequence):
    return replace(sequence, is_own=torch.arange(NUM_TOKENS) >= 2)


@pytest.mark.parametrize("factor", [0.0, 1e-37, 1e-3, 1e30, torch.inf])
def test_no_size_of_a_row_hides_its_error(run, judged_twice, factor):
    """The bound of a row with its amplification is relative to the row, so it is large for a small one."""
    hf, copy = run(torch.float32)
    copy.at(GATE, 0, 99).mul_(factor)
    for judgement in judged_twice(hf, copy):
        errors = judgement.errors[GATE]
        assert errors.rows.position[errors.bad].tolist() == [99]


def test_rows_whose_rounding_is_amplified_are_not_multiplied_out(run, tmp_path, monkeypatch):
    """Terms that cancel: above the least bound by the estimate, and judged by their own bound as exact ones are."""
    hf, copy = run(torch.float32)
    weight = hf.module(GATE).weight
    for step in copy.computing():
        x = step.taps[NORM].double()
        size = (x.square() @ weight.double().square().sum(dim=0)).sqrt()[:, None] / weight.shape[0] ** 0.5
        noise = torch.randn(len(x), weight.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        step.taps[GATE] = (x @ weight.double().T + 24 * rounding_unit(torch.float32) * size * noise).float()
    num_multiplied = []
    multiplied = projected.Projections.multiplied

    def noted(self, operation, x):
        num_multiplied.append((operation.tap, len(x)))
        return multiplied(self, operation, x)

    monkeypatch.setattr(projected.Projections, "multiplied", noted)
    errors = judged(hf, copy, tmp_path / "a").errors[GATE]
    assert errors.num_bad == 0
    least = errors.bound.min()
    assert float((errors.roundings > FAR * least).double().mean()) > 0.9
    assert dict(num_multiplied).get(GATE, 0) < 10


def rows_in(recording, hf, known):
    recording.with_names(hf.graph.aliases)
    taps = {op.tap for op in hf.graph} & {tap.name for tap in recording.taps}
    numbered = known.number(recording, hf, taps)
    return numbered, local_errors(recording, hf, taps, numbered=numbered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_row_is_found_among_few_that_no_schedule_had(run, tmp_path, monkeypatch, dtype):
    hf, sound = run(dtype)
    num_exact = []

    def noted(batch, index, least):
        num_exact.append(least)
        return exact_places(batch, index, least)

    monkeypatch.setattr(local, "exact_places", noted)
    known, (_, copy), (_, wrong) = SeenRows(), run(dtype), run(dtype)
    _, first = rows_in(sound.write(tmp_path / "a"), hf, known)
    copy.at(NORM, 0, 230).view(torch.int16)[0] ^= 1
    numbered, judgement = rows_in(copy.write(tmp_path / "b"), hf, known)
    assert (int((~numbered.is_seen).sum()), judgement.num_seen) == (20, 230)
    assert num_exact == [EXACT_ROWS, VERIFYING_ROWS]
    assert not any(errors.num_bad for errors in (*first.errors.values(), *judgement.errors.values()))
    size = {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    wrong.at(GATE, 0, 240)[5] += size * wrong.at(GATE, 0, 240).norm()
    _, judgement = rows_in(wrong.write(tmp_path / "c"), hf, known)
    assert judgement.errors[GATE].rows.position[judgement.errors[GATE].bad].tolist() == [240]
    known.num_for_power = EXACT_ROWS
    numbered, judgement = rows_in(sound.write(tmp_path / "d"), hf, known)
    assert num_exact == [EXACT_ROWS, VERIFYING_ROWS, VERIFYING_ROWS, EXACT_ROWS, EXACT_ROWS]
    assert int((~numbered.is_seen).sum()) == EXACT_ROWS
    assert judgement.sound


def test_a_gain_of_a_fifth_of_a_rounding_is_seen(run, judged_twice):
    hf, copy = run(torch.bfloat16)
    weight, gain = hf.module(GATE).weight.double(), 0.2 * rounding_unit(torch.bfloat16)
    for step in copy.computing():
        step.taps[GATE] = (step.taps[NORM].double() @ weight.T * (1 + gain)).bfloat16()
    for judgement in judged_twice(hf, copy):
        errors = judgement.errors[GATE]
        assert errors.num_bad == 0
        assert errors.effect.kind == "gain"
        assert errors.effect.low < gain < errors.effect.high


@pytest.mark.parametrize(
    "spoilt", [torch.randn_like, lambda kept: torch.cat([kept[:-1], 9 * kept[-1:]])], ids=["another's", "norms"]
)
def test_projected_weights_of_another_checkpoint_are_computed_again(run, tmp_path, spoilt):
    hf, copy = run(torch.float32)
    first = in_order(judged(hf, copy, tmp_path / "a").errors[GATE])[0]
    with copy.write(tmp_path / "b") as recording:
        projections = projected.projections_of(recording, hf, torch.float64)
    kept = dict(projections._weights)
    assert kept.keys() >= set(LINEAR)
    projections._weights[GATE] = spoilt(kept[GATE])
    projections._is_new = True
    projections.save()
    assert torch.equal(in_order(judged(hf, copy, tmp_path / "c").errors[GATE])[0], first)
    with copy.write(tmp_path / "d") as recording:
        assert torch.equal(projected.projections_of(recording, hf, torch.float64)._weights[GATE], kept[GATE])
    projections._path.write_bytes(b"damaged")
    assert torch.equal(in_order(judged(hf, copy, tmp_path / "e").errors[GATE])[0], first)


def test_the_sample_has_different_tokens(run, tmp_path):
    _, copy = run(torch.float32)
    with copy.write(tmp_path / "a") as recording:
        (sequence,) = sequences(recording)
        batch = PaddedBatch(recording, [sequence])
        assert len(exact_places(batch, 0)) >= EXACT_ROWS
        few = [7] * 200 + list(range(50))
        request = RequestInfo(id=0, token_ids=few, prompt_length=NUM_TOKENS)
        repeated = RowSequence(request=request, step=sequence.step, row=sequence.row, is_own=sequence.is_own)
        places = exact_places(PaddedBatch(recording, [repeated]), 0)
        assert len({few[at] for at in places.tolist()}) >= EXACT_ROWS
        assert places.tolist() == sorted(set(places.tolist()))
        is_seen = torch.arange(NUM_TOKENS) < NUM_TOKENS - 10
        both = PaddedBatch(recording, [repeated, replace(repeated, is_seen=is_seen)])
        places = exact_places(both, 0)
        assert not bool((places[places >= NUM_TOKENS] < 2 * NUM_TOKENS - 10).any())
        assert exact_places(PaddedBatch(recording, [replace(repeated, is_seen=is_seen)]), 0).tolist() == [
            *range(240, 250)
        ]
        assert batch.positions is None
