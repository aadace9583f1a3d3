"""An nn.Module as an engine: every row once, under HF's names, and nothing of the module left changed."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness.engines.module import HFObjectEngine, TorchEngine, module_engine
from harness.errors import Code, HarnessError
from harness.formats.taps import Kind
from harness.oracle.model import load_model

from ..own_model import NAMES, CachedModel, OwnModel, load
from .conftest import REQUESTS, computed, rows


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints / "qwen3-tiny"


@pytest.fixture(scope="module")
def graph(folder):
    return load_model(folder, dtype=torch.float32).graph


@pytest.fixture
def engine(folder, graph):
    def opened(kind=OwnModel, names=NAMES):
        engine = TorchEngine(load(folder, kind), device="cpu", names=names)
        engine.match_taps(graph)
        return engine

    return opened


def test_all_taps_but_the_caches_are_found_by_names(engine, graph):
    assert engine().capabilities.unsupported_taps == ()
    assert engine().capabilities.all_unsupported_taps() == ("k_cache", "v_cache")
    wanted = engine().capabilities.wanted(graph)
    assert set(wanted) == {operation.tap for operation in graph if operation.kind is not Kind.CACHE}


def test_what_has_no_name_is_not_offered(engine):
    names = {theirs: ours for theirs, ours in NAMES.items() if "rope" not in theirs and "qn" not in theirs}
    assert engine(names=names).capabilities.unsupported_taps == ("self_attn.q_norm", "q_rope", "k_rope")


def test_a_tap_that_one_layer_lacks_is_lacking_in_that_layer(engine):
    names = {theirs: ours for theirs, ours in NAMES.items() if theirs != "blocks.*.attn.qn"}
    one = {f"blocks.{layer}.attn.qn": f"model.layers.{layer}.self_attn.q_norm" for layer in (0, 2)}
    assert engine(names=names | one).capabilities.unsupported_taps == ("model.layers.1.self_attn.q_norm",)


@pytest.mark.parametrize("kind", [OwnModel, CachedModel])
def test_every_position_is_recorded_once_with_its_own_values(engine, graph, record, kind):
    subject = engine(kind)
    expected = {}
    for request in REQUESTS:
        seen = {}
        hook = subject._module.blocks[1].attn.kn.register_forward_hook(
            lambda _module, _args, out, seen=seen: seen.update(kn=out.transpose(0, 1).clone())
        )
        with torch.no_grad():
            logits = subject._module(torch.tensor([request.token_ids]))
        hook.remove()
        logits = logits[0][0] if isinstance(logits, tuple) else logits[0]
        for at in range(len(request.token_ids)):
            expected[request.id, at] = seen["kn"][at], logits[at]
    for schedule in subject.capabilities.schedules:
        with record(subject, schedule) as recording:
            seen, chosen = Counter(), {}
            for step in computed(recording):
                tap = "model.layers.1.self_attn.k_norm"
                for row, values in zip(rows(step, tap), step.tap(tap), strict=True):
                    seen[row] += 1
                    torch.testing.assert_close(values, expected[row][0], rtol=1e-4, atol=1e-4)
                if "lm_head" in step.tap_names:
                    for row, values in zip(rows(step, "lm_head"), step.tap("lm_head"), strict=True):
                        torch.testing.assert_close(values, expected[row][1], rtol=1e-4, atol=1e-4)
                choices = [-1] * len(step.request) if step.sampled is None else step.sampled.tolist()
                sampled = zip(step.request.tolist(), step.position.tolist(), choices, strict=True)
                chosen |= {(request, at): token for request, at, token in sampled if token >= 0}
            assert seen == Counter({(request.id, at) for request in REQUESTS for at in range(len(request.token_ids))})
            assert chosen == {
                (request.id, at): int(expected[request.id, at][1].argmax())
                for request in REQUESTS
                for at in range(request.prompt_length - 1, len(request.token_ids))
            }
            folder = recording.path
        for file in folder.iterdir():
            file.unlink()


def test_a_module_with_a_cache_is_fed_each_token_once(engine, record):
    subject, fed = engine(CachedModel), []
    subject._module.tok.register_forward_hook(lambda _module, args, _out: fed.append(args[0].numel()))
    with record(subject, "chunked:3", REQUESTS[:1]):
        assert fed == [3, 3, 2, 1, 1]
    assert subject.capabilities.schedules == ("plain", "chunked")


def test_a_module_without_one_is_fed_the_whole_sequence(engine, record):
    subject, fed = engine(OwnModel), []
    subject._module.tok.register_forward_hook(lambda _module, args, _out: fed.append(args[0].numel()))
    with record(subject, "plain", REQUESTS[:1]) as recording:
        assert fed == [8, 9, 10]
        assert [step.phase for step in recording.steps] == ["prefill", "decode", "decode"]
    assert subject.capabilities.schedules == ("plain",)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_and_modes_are_as_before_also_after_an_error(engine, record, fails):
    subject = engine()
    model = subject._module
    model.train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    if fails:
        model.ln.forward = lambda _x: 1 / 0
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        record(subject, "plain", REQUESTS[:1])
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_that_takes_a_cache_and_returns_none_is_fed_the_whole_sequence(engine, record):
    class Forgetful(OwnModel):
        def forward(self, tokens, cache=None):
            assert cache is None
            return super().forward(tokens)

    subject, fed = engine(Forgetful), []
    subject._module.tok.register_forward_hook(lambda _module, args, _out: fed.append(args[0].numel()))
    with record(subject, "plain", REQUESTS[:1]):
        assert fed == [8, 9, 10]
    assert subject.capabilities.schedules == ("plain",)


class Fused(nn.Module):
    """A norm that adds its residual first and returns both, and a layer that returns the two parts of its output."""

    def __init__(self, size, vocabulary):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList([self.Layer(size)])
        self.lm_head = nn.Linear(size, vocabulary)

    def forward(self, input_ids):
        hidden, residual = self.layers[0](self.embed_tokens(input_ids))
        return self.lm_head(hidden + residual)

    class Layer(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.post_attention_layernorm = type(
                "Norm", (nn.Module,), {"forward": lambda self, x, residual: (x + residual, x - residual)}
            )()

        def forward(self, x):
            return self.post_attention_layernorm(x, 2 * x)


def test_two_tensors_of_one_shape_are_told_apart_for_norms_alone(graph):
    subject = TorchEngine(Fused(96, 256), device="cpu", names={"": "model", "lm_head": "lm_head"})
    subject.match_taps(graph)
    places = {place.operation.tap: place for group in subject._places.values() for place in group}
    assert places["model.layers.0.post_attention_layernorm"].index == 0
    assert "model.layers.0.output" not in places  # hidden, or residual?
    assert "model.layers.0.attn_residual" not in places
    assert "model.embed_tokens" in places


def test_a_module_none_of_whose_parts_is_known_is_told_how_to_name_them(folder, graph):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 256)

        def forward(self, ids):
            return self.head(self.norm(torch.zeros(*ids.shape, 4)))

    with pytest.raises(HarnessError) as caught:
        TorchEngine(Body(), device="cpu").match_taps(graph)
    assert caught.value.code is Code.BAD_OPTION
    assert 'names={"": "model"}' in str(caught.value)
    TorchEngine(Body(), device="cpu", names={}).match_taps(graph)  # on purpose: its logits alone


class Padded(OwnModel):
    """Computes a multiple of 16 rows and cuts its logits."""

    def forward(self, tokens):
        return super().forward(nn.functional.pad(tokens, (0, -tokens.shape[1] % 16)))[:, : tokens.shape[1]]


class Unseen(OwnModel):
    """Its parts are not called, so that no hook sees them."""

    def forward(self, tokens):
        return self.tok.forward(tokens) @ self.tok.weight.T


@pytest.mark.parametrize(
    ("kind", "actual", "hint"),
    [
        (
            Padded,
            "actual:   [16, 96]",
            "give it a method step(work): token ids tell its rows, docs/check-any-engine.md",
        ),
        (Unseen, "actual:   it was not called", "hooks see neither module.forward(x) nor a use of its weight"),
    ],
)
def test_a_module_with_the_right_names_that_shows_no_rows_is_told_why(engine, kind, actual, hint):
    """It was told to give the names that it had given."""
    with pytest.raises(HarnessError) as caught:
        engine(kind)
    assert caught.value.code is Code.BAD_OPTION
    assert "have HF's names, but none of them shows one row for each token" in str(caught.value)
    assert "where:    tok, which is model.embed_tokens" in str(caught.value)
    assert "expected: [1, 11, 96], or the same without the 1" in str(caught.value)
    assert actual in str(caught.value)
    assert hint in str(caught.value)


def test_a_module_with_a_cache_of_its_own_that_is_not_set_up_is_run_without_positions(engine, record, graph):
    class Inner(OwnModel):
        def forward(self, tokens, input_pos=None):
            if input_pos is not None:
                raise TypeError("You need to call set_kv_cache()")
            return super().forward(tokens)

    subject = engine(Inner)
    with record(subject, "plain", REQUESTS[:1]) as recording:
        assert {op.tap for op in graph if op.kind is Kind.EMBEDDING} <= {tap.name for tap in recording.taps}


def test_a_module_that_raises_in_any_case_says_what_it_said_first(engine):
    class Broken(OwnModel):
        def forward(self, tokens, input_pos=None):
            raise TypeError("with positions" if input_pos is not None else "without")

    with pytest.raises(TypeError, match="with positions"):
        engine(Broken)


def test_a_cache_inside_of_a_module_is_used_where_the_forward_returns_something_in_its_place(engine, record, graph):
    class Inside(nn.Module):
        """Takes positions, and begins again where it is given no cache."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.kept = inner, None

        def forward(self, tokens, cache=None):
            logits, self.kept = self.inner(tokens, None if cache is None else self.kept)
            return logits, "inside"

    subject = engine(CachedModel)
    inside = TorchEngine(Inside(subject._module), device="cpu", names={f"inner.{k}": v for k, v in NAMES.items()})
    inside.match_taps(graph)
    assert inside.capabilities.schedules == ("plain", "chunked")
    with record(inside, "plain", REQUESTS) as recording:
        assert sum(len(step.request) for step in recording.steps) == sum(len(request.token_ids) for request in REQUESTS)
        assert graph.logits in recording.steps[-1].tap_names


def test_a_module_that_has_the_name_of_another_by_chance_is_refused(folder, graph):
    model = load(folder)
    model.model = nn.ModuleDict({"norm": nn.Identity()})
    model.head.register_forward_pre_hook(lambda _module, args: model.model["norm"](args[0]))
    with pytest.raises(HarnessError) as caught:
        TorchEngine(model, device="cpu", names=NAMES).match_taps(graph)
    assert "two modules have the same name" in str(caught.value)
    assert "'ln' and 'model.norm' are both 'model.norm'" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, at its first compilation
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_module_is_refused(folder, is_wrapped):
    model = load(folder)
    if is_wrapped:
        model = torch.compile(model)
    else:
        model.compile()
    with pytest.raises(HarnessError, match=r"before torch\.compile"):
        module_engine(model, folder=folder, dtype="float32", device="cpu")


# Model objects of HF's.


@pytest.fixture
def hf_model(folder):
    return load_model(folder, dtype=torch.float32).model


def hf_object(model, folder, graph):
    engine = module_engine(model, folder=folder, dtype="float32", device="cpu")
    assert isinstance(engine, HFObjectEngine)
    engine.match_taps(graph)
    return engine


def test_an_hf_model_shows_all_taps_of_hfs_own(hf_model, folder, graph):
    engine = hf_object(hf_model, folder, graph)
    assert engine.name == "Qwen3ForCausalLM"
    assert engine.capabilities.all_unsupported_taps() == ()
    schedules = ("plain", "chunked", "batched", "prefix-hit", "forked", "preempted", "rewound", "speculative")
    assert engine.capabilities.schedules == schedules


def test_an_hf_model_with_names_is_run_as_anybodys(hf_model, folder):
    engine = module_engine(hf_model, folder=folder, dtype="float32", device="cpu", names={})
    assert isinstance(engine, TorchEngine)


class OwnAttention(nn.Module):
    """HF's attention written anew: it does not use HF's interface, so that no query, key or context is shown."""

    def __init__(self, original):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            setattr(self, name, getattr(original, name))
        self.head_dim, self.layer = original.head_dim, original.layer_idx

    def forward(self, hidden_states, position_embeddings, cache=None, past_key_values=None, **_options):
        cache = cache if past_key_values is None else past_key_values  # its name before transformers 5.24
        batch, tokens, _ = hidden_states.shape
        cos, sin = (x[:, None] for x in position_embeddings)
        q, k, v = (
            f(hidden_states).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (x * cos + self.turned(x) * sin for x in (self.q_norm(q), self.k_norm(k)))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mask = torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def turned(self, x):
        half = self.head_dim // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_a_module_in_the_place_of_hfs_shows_what_it_has_under_hfs_paths(hf_model, folder, graph, record):
    for layer in hf_model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    engine = hf_object(hf_model, folder, graph)
    assert set(engine.capabilities.unsupported_taps) == {
        "q_rope",
        "k_rope",
    }  # the context is what o_proj is called with
    with record(engine, "plain", REQUESTS[:1]) as recording:
        step = recording.steps[0]
        assert step.tap("model.layers.1.attention").shape[0] == 8
        assert step.tap("model.layers.1.self_attn.q_norm").shape[0] == 8


def test_an_hf_model_in_training_is_run_without_dropout_and_is_in_training_again(hf_model, folder, graph, record):
    hf_model.train()
    engine = hf_object(hf_model, folder, graph)
    modes = []
    hf_model.model.norm.register_forward_hook(lambda module, _args, _out: modes.append(module.training))
    with record(engine, "plain", REQUESTS[:1]):
        assert set(modes) == {False}
    assert all(module.training for module in hf_model.modules())
