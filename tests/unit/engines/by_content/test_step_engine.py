"""A live engine is checked without a table, sound and with faults; the table of the page says what is what."""

from functools import partial
from itertools import count, product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

import harness
from harness.engines.by_content.forwards import run_step
from harness.engines.by_content.learn import learn_map
from harness.engines.by_content.rows import RequestWork
from harness.engines.by_content.step_engine import StepEngine
from harness.engines.module.forward import ModuleStepper
from harness.errors import Code, HarnessError
from harness.oracle.model import load_model

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]
SCHEDULES = ["plain", "chunked:3", "batched", "mixed:4"]


def check(engine, checkpoints, name="qwen2-tiny", schedules=("plain",), **options):
    options = {"prompts": PROMPTS, "max_new_tokens": 4, "schedules": schedules, **options}
    return harness.check(engine, model=checkpoints / name, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_operation_of_a_sound_engine_passes(fused_engine, checkpoints, dtype):
    result = check(fused_engine(dtype=dtype), checkpoints, schedules=SCHEDULES)
    for run in result.runs:
        assert run.findings == ()
        assert run.coverage.missing == 0
        assert set(run.coverage.not_offered) == {"k_cache", "v_cache"}
    assert (sum(result.seen.num_taps.values()), result.seen.num_forwards) == (48, (1, 1))
    assert set(result.seen.lost) == {"k_cache", "v_cache"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_in_16_bits_is_not_checked_in_float32(fused_engine, checkpoints, dtype):
    """Its dtype is not that of its modules where it has none."""
    engine = fused_engine(dtype=dtype)
    hidden = SimpleNamespace(step=lambda work: engine.step(work))
    with pytest.raises(HarnessError, match="products are of another dtype") as caught:
        check(hidden, checkpoints)
    name = str(dtype).removeprefix("torch.")
    assert caught.value.code is Code.DIFFERENT_DTYPES
    assert caught.value.hint == f'dtype="{name}"'


def test_weights_in_float32_are_checked_in_16_bits_under_autocast_alone(fused_engine, checkpoints, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoints / "qwen2-tiny", dtype=torch.bfloat16).save_pretrained(tmp_path)
    engine = fused_engine(tmp_path)

    def step(work):
        with torch.autocast("cpu", torch.bfloat16):
            return engine.step(work)

    cast = SimpleNamespace(engine=engine, step=step)
    assert check(cast, tmp_path, "", dtype="bfloat16").is_ok
    for stepper, dtype, computed in ((engine, "bfloat16", "float32"), (cast, "auto", "bfloat16")):
        with pytest.raises(HarnessError, match="products are of another dtype") as caught:
            check(stepper, tmp_path, "", dtype=dtype)
        assert caught.value.hint == f'dtype="{computed}"'


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (
            ValueError("block table 7 vs 8"),
            "each step has one request, since one of two raised ValueError: block table 7",
        ),
        (ValueError("too many values to unpack (expected 1)"), None),
    ],
)
def test_what_an_engine_raises_in_a_batch_is_said(fused_engine, checkpoints, error, note):
    engine = fused_engine()

    def step(work):
        if len(work) > 1:
            raise error
        return engine.step(work)

    notes = check(SimpleNamespace(step=step, model=engine.model), checkpoints).notes
    assert [item for item in notes if "one of two raised" in item and note is None] == []
    assert note is None or any(item.startswith(note) for item in notes)


@pytest.mark.slow
def test_a_bug_that_the_model_has_of_itself_is_named(fused_engine, checkpoints):
    """The toy knows no scaling of frequencies, which llama-tiny has."""
    first = check(fused_engine("llama-tiny"), checkpoints, "llama-tiny").runs[0].first_divergence
    assert first.tap == "model.layers.0.q_rope"
    assert "scaling" in first.explanation.cause


FAULTS = {}


def fault(tap):
    def keep(plant):
        FAULTS[plant.__name__] = tap, plant
        return plant

    return keep


@fault("model.layers.0.q_rope")
def rotary_at_another_position(model, fused):
    rotary, forward = model.layers[0].rotary, fused.Rotary.forward
    rotary.forward = lambda positions, q, k: forward(rotary, positions - 1, q, k)


@fault("model.layers.0.input_layernorm")
def another_eps(model, _fused):
    for layer in model.layers:
        layer.input_layernorm.eps = 1e-2


@fault("model.layers.1.input_layernorm")
def weight_plus_one(model, _fused):
    model.layers[1].input_layernorm.weight.data += 1


@fault("model.layers.0.mlp.act")
def another_activation(model, _fused):
    for layer in model.layers:
        layer.act.forward = lambda x: functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


@fault("model.layers.1.mlp.act")
def gate_and_up_swapped(model, _fused):
    model.layers[1].act.forward = lambda x: functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0]


@fault("model.layers.1.mlp.down_proj")
def rows_in_another_order(model, _fused):
    weight = model.layers[1].down_proj.weight
    weight.data = weight.data.roll(1, dims=0)


@fault("model.layers.0.mlp.down_proj")
def stale_weights(model, _fused):
    weight = model.layers[0].down_proj.weight
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight) * weight.std()


@fault("model.layers.1.self_attn.q_proj")
def no_bias(model, _fused):
    model.layers[1].qkv_proj.bias = None


@fault("model.layers.2.self_attn.o_proj")
def half_as_much_again(model, _fused):
    model.layers[2].o_proj.weight.data *= 1.5


@fault("lm_head")
def another_head(model, _fused):
    model.head.weight = nn.Parameter(model.head.weight.data.roll(3, dims=1))


@fault("model.embed_tokens")
def scaled_embedding(model, _fused):
    model.embed.weight.data = model.embed.weight.data * 3


@fault("model.layers.1.output")
def half_of_a_branch(model, fused):
    norm, forward = model.layers[2].input_layernorm, fused.RMSNorm.forward
    norm.forward = lambda x, residual=None: forward(norm, x * 0.5, residual)


@fault("model.layers.1.self_attn.v_proj")
def heads_of_values_swapped(model, _fused):
    weight = model.layers[1].qkv_proj.weight
    weight.data[-64:] = weight.data[-64:].clone().view(2, 32, -1).flip(0).reshape(64, -1)


@fault("model.norm")
def final_norm_without_weight(model, _fused):
    model.norm.weight.data = torch.ones_like(model.norm.weight)


@fault("model.layers.1.attention")
def heads_of_the_context_swapped(model, fused):
    attn, forward = model.layers[1].attn, fused.Attention.forward
    attn.forward = lambda *arguments: forward(attn, *arguments).view(-1, 2, 2, 32).transpose(1, 2).reshape(-1, 128)


def scaled_outside(layer, name):
    """Scale what a module returns, in the code that calls it."""
    module = getattr(layer, name)
    delattr(layer, name)
    setattr(layer, name, lambda *arguments: module(*arguments) * 1.5)


@fault("model.layers.1.attention")
def context_scaled_before_the_product(model, _fused):
    scaled_outside(model.layers[1], "attn")


@fault("model.layers.1.mlp.act")
def activation_scaled_before_the_product(model, _fused):
    scaled_outside(model.layers[1], "act")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dtype"), list(product(FAULTS, (torch.float32, torch.bfloat16))))
def test_a_fault_is_found_at_its_operation_and_hides_no_tap(fused_engine, fused, checkpoints, name, dtype):
    tap, plant = FAULTS[name]
    engine = fused_engine(dtype=dtype)
    plant(engine.model, fused)
    (run,) = check(engine, checkpoints).runs
    assert run.first_divergence.tap == tap
    assert set(run.coverage.not_offered) == {"k_cache", "v_cache"}


def computing_few_rows(engine, fused):
    """The toy as an engine that computes rows after the last attention only where a token is chosen."""
    model, last = engine.model, engine.model.layers[-1]
    attend, norm, forward = last.attn.forward, last.post_attention_layernorm, model.forward

    def few(ids, batch):
        sampled = batch["sampled"]
        last.attn.forward = lambda *arguments: attend(*arguments)[sampled]
        norm.forward = lambda x, residual: fused.RMSNorm.forward(norm, x, residual[sampled])
        return forward(ids, {**batch, "sampled": slice(None)})

    model.forward = lambda ids, batch: few(ids, batch)
    return engine


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", [None, *(name for name, (tap, _) in FAULTS.items() if ".2." in tap)])
def test_an_engine_may_compute_few_rows_after_the_last_attention(fused_engine, fused, checkpoints, fault):
    engine = computing_few_rows(fused_engine(), fused)
    tap, plant = FAULTS[fault] if fault else (None, lambda *_options: None)
    plant(engine.model, fused)
    for run in check(engine, checkpoints, schedules=SCHEDULES).runs:
        first = run.first_divergence
        assert (None if first is None else first.tap) == tap
        assert run.coverage.missing == 0
        assert set(run.coverage.not_offered) == {"k_cache", "v_cache"}


class Answering:
    """An engine that returns what it is told to, and computes nothing."""

    def __init__(self, answer):
        self.answer = answer

    def step(self, work):
        return self.answer(work)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda work: [0.0], "no row of logits for each request"),
        (lambda work: torch.zeros(len(work) + 1, 256), r"no row of logits.*\[\d+, 256\]"),
        (lambda work: torch.zeros(len(work), 256, dtype=torch.int64), "no row of logits"),
        (lambda work: 1 / 0, "the engine raised ZeroDivisionError"),
    ],
)
def test_what_is_no_engine_is_told_what_it_lacks(checkpoints, answer, words):
    with pytest.raises(harness.HarnessError, match=f"(?s){words}"):
        check(Answering(answer), checkpoints)


@pytest.mark.slow
def test_not_a_number_is_found_and_no_pass(fused_engine, checkpoints):
    engine = fused_engine()
    engine.model.layers[1].o_proj.weight.data[3] = torch.nan
    report = check(engine, checkpoints)
    assert not report
    assert report.runs[0].outcome.value == "mismatch"


@pytest.mark.slow
def test_a_module_with_other_names_is_told_by_content(fused_engine, checkpoints):
    """No module of it is called as in the checkpoint, so that no name could tell."""
    report = harness.check(
        Logits(fused_engine().model), model=checkpoints / "qwen2-tiny", prompts=PROMPTS, max_new_tokens=2
    )
    assert report, report.text()
    assert sum(report.seen.num_taps.values()) == 48
    assert set(report.runs[0].coverage.not_offered) == {"k_cache", "v_cache"}


class Logits(nn.Module):
    """The toy as a module that takes token ids and computes all of them each time."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids):
        count = input_ids.shape[1]
        slots = torch.arange(count)
        batch = {"rows": [list(range(count))], "tables": [list(range(count))], "sampled": list(range(count))}
        return self.inner(input_ids[0], batch | {"positions": slots, "slots": slots})[None]


def test_no_tap_is_given_to_a_tensor_that_is_another_value(fused_engine, checkpoints):
    """Hooks on the toy's modules, by hand, are the truth."""
    engine, numbers = fused_engine(), count()
    hf = load_model(checkpoints / "qwen2-tiny", dtype=torch.float32)
    learned = learn_map(engine, hf, dtype=torch.float32, numbers=numbers)
    work, by_hand = [(next(numbers), PROMPTS[1], 0)], {}
    for path, module in engine.model.named_modules():
        module.register_forward_hook(partial(keep_by_hand, by_hand, path))
    forwards, logits = run_step(engine, work, learned.teller, keep=lambda _forwards, _site, tensor: tensor.clone())
    shown = learned.teller.in_order(forwards, [RequestWork(PROMPTS[1], 0)])
    read = {tap: values for tap, (values, _rows) in learned.read(shown, last=[13]).items()} | {"lm_head": logits}
    assert set(read) == {hf.graph.canonical(tap) for tap in by_hand}
    for tap, value in by_hand.items():
        assert torch.equal(read[hf.graph.canonical(tap)], value.flatten(1)), tap


def keep_by_hand(kept, path, _module, _arguments, output):
    """Keep what a module of the toy returns, without the row of padding: norms return the residual, too."""
    layer, _, name = path.removeprefix("layers.").partition(".")
    at = f"model.layers.{layer}."
    values = [item.clone() for item in (output if isinstance(output, tuple) else (output,)) if item is not None]
    rotary = f"model.layers.{sum('q_rope' in tap for tap in kept)}."  # one module serves all layers
    names = {
        "embed": ["model.embed_tokens"],
        "norm": ["model.norm", "model.layers.2.output"],
        "head": ["lm_head"],
        "input_layernorm": [f"{at}input_layernorm", f"model.layers.{int(layer or 0) - 1 if name else 0}.output"],
        "qkv_proj": [f"{at}self_attn.{part}_proj" for part in "qkv"],
        "rotary": [f"{rotary}q_rope", f"{rotary}k_rope"],
        "attn": [f"{at}attention"],
        "o_proj": [f"{at}self_attn.o_proj"],
        "post_attention_layernorm": [f"{at}post_attention_layernorm", f"{at}attn_residual"],
        "gate_up_proj": [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"],
        "act": [f"{at}mlp.act"],
        "down_proj": [f"{at}mlp.down_proj"],
    }.get(name or layer, [])
    if name in ("qkv_proj", "gate_up_proj"):
        values = values[0].split([128, 64, 64] if len(names) == 3 else [192, 192], dim=-1)
    kept.update({tap: value[:14] for tap, value in zip(names, values, strict=False)})


def rewinding(fused_engine, fused):
    """The toy as an engine that goes back, and returns the logits of all tokens."""
    engine = fused_engine()
    step, forward = engine.step, engine.model.forward

    def going_back(work):
        for request, _, first in work:
            del engine.slots.setdefault(request, [])[first:]
        return step(work)

    engine.rewinds, engine.step = True, going_back
    engine.model.forward = lambda ids, batch: forward(ids, {**batch, "sampled": [*range(len(ids) - 1)]})
    return engine


@pytest.mark.slow
def test_an_engine_that_goes_back_follows_drafts(fused_engine, fused, checkpoints):
    report = harness.check(
        rewinding(fused_engine, fused), model=checkpoints / "qwen2-tiny", prompts=PROMPTS[:1], max_new_tokens=9,
        schedules=["rewound", "speculative"],
    )  # fmt: skip
    assert report, report.text()
    assert [run.coverage.missing for run in report.runs] == [0, 0]


@pytest.mark.slow
def test_what_it_leaves_in_its_cache_is_named(fused_engine, fused, checkpoints, monkeypatch):
    """The first key and value that are written to a slot of the second layer stay."""
    engine = rewinding(fused_engine, fused)
    attention, store, written = engine.model.layers[1].attn, fused.Attention.store, (set(), set())

    def stays(part, rows, slots):
        new = [at for at, slot in enumerate(slots.tolist()) if slot not in written[part]]
        written[part].update(slots.tolist())
        store(attention, part, rows[new], slots[new])

    step = engine.step

    def going_back(work):
        kept = {request: list(engine.slots.get(request, ())) for request, _, _ in work}
        engine.free += [
            slot // fused.BLOCK
            for request, _, first in work
            for slot in kept[request][first:]
            if slot % fused.BLOCK == 0
        ][::-1]
        return step(work)

    engine.step, attention.store = going_back, stays
    run = harness.check(
        engine, model=checkpoints / "qwen2-tiny", prompts=PROMPTS[:1], max_new_tokens=6, schedules=["rewound"]
    ).runs[0]
    assert run.first_divergence.tap == "model.layers.1.attention"
    assert (
        run.first_divergence.explanation.cause
        == "attends to a token that was taken back, position 9, written in step 1"
    )


def test_an_engine_with_the_logits_of_the_last_token_alone_verifies_nothing(fused_engine, checkpoints):
    engine = fused_engine()
    engine.rewinds = True
    with pytest.raises(harness.HarnessError, match="returns no row of logits for each token"):
        harness.check(engine, model=checkpoints / "qwen2-tiny", prompts=PROMPTS[:1], schedules=["speculative"])


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_not_asked_to_go_back(fused_engine, checkpoints):
    with pytest.raises(harness.HarnessError, match="cannot follow the schedule 'rewound'"):
        check(fused_engine(), checkpoints, schedules=["rewound"])


def with_prefixes(engine, fused, cached=lambda table, num: table[:num]):
    """The toy with whole blocks of prompts that it has seen; `cached` chooses the slots that a hit reads."""
    seen, step = {}, engine.step

    def begin(request, prompt):
        num = max((len(prefix) for prefix in seen if list(prefix) == prompt[: len(prefix)]), default=0)
        engine.slots[request] = cached(seen.get(tuple(prompt[:num]), []), num)
        for end in range(fused.BLOCK, len(prompt), fused.BLOCK):
            seen.setdefault(tuple(prompt[:end]), engine.slots[request])
        return num

    engine.begin = begin
    engine.step = lambda work: step(work)
    return engine


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_begins_where_its_cache_ends(fused_engine, fused, checkpoints, dtype):
    (run,) = check(with_prefixes(fused_engine(dtype=dtype), fused), checkpoints, schedules=("prefix-hit",)).runs
    assert run.findings == ()
    assert "prefix_hit" in run.coverage.triggers
    assert run.coverage.missing == 0


@pytest.mark.slow
def test_a_hit_on_another_block_is_found(fused_engine, fused, checkpoints):
    """The last block of what is cached is the first one."""

    def first_again(table, num):
        return [*table[: num - fused.BLOCK], *table[: fused.BLOCK]][:num]

    engine = with_prefixes(fused_engine(), fused, first_again)
    (run,) = check(engine, checkpoints, schedules=("prefix-hit",)).runs
    assert run.first_divergence.tap == "model.layers.0.attention"
    assert run.first_divergence.request >= len(PROMPTS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("answer", [-1, 9, None])
def test_a_hit_leaves_the_last_token_to_compute(fused_engine, fused, checkpoints, answer):
    engine = fused_engine()
    engine.begin = lambda _request, _prompt: answer
    with pytest.raises(harness.HarnessError, match="how many tokens of request 0 are cached"):
        check(engine, checkpoints, schedules=("prefix-hit",))


def test_an_engine_that_finds_no_prefix_does_not_pass(fused_engine, checkpoints):
    engine = fused_engine()
    engine.begin = lambda _request, _prompt: 0
    (run,) = check(engine, checkpoints, schedules=("prefix-hit",)).runs
    assert run.outcome.value != "pass"
    assert any("no request found its beginning in the cache" in finding.message for finding in run.findings)


class Nameless:
    """A model of transformers in a list, where nothing finds its modules by their names."""

    def __init__(self, folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.held = [ModuleStepper(model, torch.device("cpu"))]

    def step(self, work):
        return self.held[0].step(work)


@pytest.mark.slow
def test_rows_of_earlier_tokens_are_not_taken_for_those_of_the_step(checkpoints):
    """DeepSeek-V3 in transformers makes keys and values of all latents of its cache in each step."""
    folder = checkpoints / "deepseek-v3-tiny"
    engine = StepEngine(lambda: Nameless(folder), name="nameless", folder=folder, dtype="float32")
    for run in check(engine, checkpoints, "deepseek-v3-tiny", schedules=("plain", "chunked:3")).runs:
        assert run.findings == ()
        assert "model.layers.0.self_attn.kv_b_proj" not in run.coverage.not_offered


def rotating_neighbours(engine, fused):
    """Rotate neighbouring elements, with the weights in that order; a product has the parts of a KV head together."""
    for layer in engine.model.layers:
        product_, (num_heads, size) = layer.qkv_proj, layer.attn.shape
        order = torch.arange(size).view(2, -1).T.flatten()
        rows = torch.arange(len(product_.weight)).view(-1, size)
        queries, keys, values = rows.split([len(rows) - 2 * num_heads, num_heads, num_heads])
        parts = [queries[:, order].view(num_heads, -1, size), keys[:, order][:, None], values[:, None]]
        together = torch.cat(parts, dim=1).flatten()
        product_.weight.data, product_.bias.data = product_.weight.data[together], product_.bias.data[together]

        def forward(x, product_=product_, num_heads=num_heads, size=size):
            y = fused.Linear.forward(product_, x)[0].view(len(x), num_heads, -1, size)
            return torch.cat([y[:, :, :-2].flatten(1), y[:, :, -2].flatten(1), y[:, :, -1].flatten(1)], dim=1), None

        product_.forward = forward
    rotary = engine.model.layers[0].rotary

    def rotate(positions, q, k):
        angles = (positions[:, None].float() * rotary.inv_freq)[:, None]
        for x in (q, k):
            pairs = x.view(len(x), -1, rotary.head_dim // 2, 2)
            a, b = pairs.clone().unbind(-1)
            turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
            pairs.copy_(torch.stack(turned, dim=-1))
        return q, k

    rotary.forward = rotate
    return engine


def test_rotary_may_turn_neighbouring_elements(fused_engine, fused, checkpoints):
    (run,) = check(rotating_neighbours(fused_engine(), fused), checkpoints).runs
    assert run.findings == ()
    assert set(run.coverage.not_offered) == {"k_cache", "v_cache"}


@pytest.mark.parametrize("begin", [0, 3])
def test_the_first_tensor_that_is_not_finite_is_judged(fused_engine, fused, checkpoints, begin):
    """From some position on attention of the first layer is NaN, and so is all that is computed from it."""
    engine = fused_engine()
    attn = engine.model.layers[0].attn

    def forward(q, k, v, batch):
        is_late = (batch["positions"] >= begin)[:, None]
        return fused.Attention.forward(attn, q, k, v, batch).masked_fill(is_late, float("nan"))

    attn.forward = forward
    (run,) = check(engine, checkpoints).runs
    assert run.first_divergence.tap == "model.layers.0.attention"
    assert run.first_divergence.position == begin


def test_names_come_before_what_is_guessed(fused_engine, checkpoints):
    """The name of a tensor that is not the tap is believed, and the tap is judged by it."""
    names = {"layers.1.input_layernorm": "model.layers.1.post_attention_layernorm"}
    engine, model = fused_engine(), checkpoints / "qwen2-tiny"
    result = harness.check(engine, model=model, prompts=PROMPTS, max_new_tokens=2, schedules=["plain"], names=names)
    assert result.sources["model.layers.1.post_attention_layernorm"].evidence == "you named it"
