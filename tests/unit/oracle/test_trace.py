"""What is a tap, told from runs of two lengths: rows as wide as the history are none, copies of several values are."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.checkpoint import Checkpoint
from harness.formats.taps import Kind
from harness.oracle.flow import Origin
from harness.oracle.model import HFModel
from harness.oracle.trace import (
    _SAME,
    _SAME_ROUNDINGS,
    ForwardTrace,
    Shown,
    _bridged,
    _is_causal,
    _is_mask,
    unmistakable_sizes,
)

from ..decoder_graph import decoder_graph
from ..tiny_models import tiny_model

PREFIX = "model.layers.1."


def hf_of(model):
    return HFModel(model=model, checkpoint=Checkpoint(Path()), dtype=torch.float32, device=torch.device("cpu"))


def with_mlp(build, **changes):
    """Return a small Llama with another MLP in its second layer."""
    model = tiny_model("llama", **changes)
    torch.manual_seed(1)
    model.model.layers[1].mlp = build(model.config.hidden_size).eval()
    return hf_of(model)


def sites(hf):
    return [op.tap.removeprefix(PREFIX) for op in hf.graph.of_layer(1)]


class LookingBack(nn.Module):
    """Mixes the tokens so far, and shows a row of its scores in a width that is made of their number."""

    def __init__(self, size, widen):
        super().__init__()
        self.scores, self.out = nn.Identity(), nn.Linear(size, size, bias=False)
        self._widen = widen

    def forward(self, x):
        scores = (x @ x.transpose(1, 2)).tanh().tril()
        wide = self.scores(self._widen(scores))
        back = wide[..., : x.shape[1]]
        return self.out(back @ x[:, : back.shape[-1]])


WIDTHS = {
    "one for each token": lambda x: x,
    "and a sink": lambda x: nn.functional.pad(x, (0, 1)),
    "twice": lambda x: torch.cat([x, x], dim=-1),
    "one for every second token": lambda x: x[..., ::2],
    "rounded up to 4": lambda x: nn.functional.pad(x, (0, -x.shape[-1] % 4)),
    "at most 12": lambda x: x[..., :12],
}


@pytest.mark.parametrize("width", [*WIDTHS, "rounded up to 16"])
def test_a_row_as_wide_as_the_history_is_no_tap(width):
    """In another run it would have another width. What reads it comes from what it was computed from."""
    widths = WIDTHS | {"rounded up to 16": lambda x: nn.functional.pad(x, (0, -x.shape[-1] % 16))}
    hf = with_mlp(lambda size: LookingBack(size, widths[width]))
    assert not [site for site in sites(hf) if site.startswith("mlp.scores")]
    read = hf.graph[f"{PREFIX}mlp.out.input"]
    assert read.inputs == (f"{PREFIX}post_attention_layernorm",)
    assert read.kind is Kind.OTHER, "what was run for the scores was run for it, too"
    assert hf.graph[f"{PREFIX}mlp.out"].kind is Kind.LINEAR


def test_a_row_of_a_width_of_its_own_is_a_tap():
    """The same module, whose scores are of the first four tokens whatever the history."""
    hf = with_mlp(lambda size: LookingBack(size, lambda x: x[..., :4]))
    scores = hf.graph[f"{PREFIX}mlp.scores.input"]
    assert scores.shape == (4,)
    assert hf.graph[f"{PREFIX}mlp.out.input"].inputs == (scores.tap, f"{PREFIX}post_attention_layernorm")


class Switching(nn.Module):
    """Runs another module once there are some tokens."""

    def __init__(self, size, limit):
        super().__init__()
        self.short, self.long, self.out = (nn.Linear(size, size, bias=False) for _ in range(3))
        self._limit = limit

    def forward(self, x):
        return self.out((self.short if x.shape[1] < self._limit else self.long)(x).tanh())


@pytest.mark.parametrize(("limit", "expected"), [(2, "mlp.long"), (1000, "mlp.short"), (None, None)])
def test_a_module_that_runs_for_some_lengths_only_is_no_tap(limit, expected):
    if limit is None:  # between the two lengths
        limit = max(unmistakable_sizes(hf_of(tiny_model("llama")))[1])
    hf = with_mlp(lambda size: Switching(size, limit))
    assert [site for site in sites(hf) if site in ("mlp.short", "mlp.long")] == ([expected] if expected else [])
    behind = expected or "post_attention_layernorm"
    (activation,) = hf.graph[f"{PREFIX}mlp.out"].inputs
    assert hf.graph[activation].inputs == (f"{PREFIX}{behind}",)


@pytest.mark.parametrize("size", [11, 37, 33, 111])
def test_a_size_that_is_a_number_of_tokens_is_not_taken_for_one(size):
    """11 and 37 tokens of 3 requests are what a model is traced with if none of its sizes is one of these."""
    plain = hf_of(tiny_model("llama"))
    assert unmistakable_sizes(plain) == (3, (11, 37))
    hf = hf_of(tiny_model("llama", intermediate_size=size))
    requests, lengths = unmistakable_sizes(hf)
    assert size not in {requests * length for length in lengths} | set(lengths)
    assert len(set(lengths)) == 2
    brief = [(op.tap, op.kind.value, op.inputs) for op in hf.graph]
    assert brief == [(op.tap, op.kind.value, op.inputs) for op in decoder_graph(num_layers=2, has_qk_norm=False)]


# Values that are moved and not computed with.


class Joining(nn.Module):
    """Reads a value beside what was made of it, as A.X K2 does."""

    def __init__(self, size, parts):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(size), nn.Linear(len(parts) * size, size, bias=False)
        self._parts = parts

    def forward(self, x):
        values = {"x": x, "normed": self.norm(x)}
        return self.proj(torch.cat([values[part] for part in self._parts], dim=-1))


def test_a_copy_of_two_values_is_a_tap():
    """A product reads it as one: without it, it would have two inputs and be no linear operation."""
    hf = with_mlp(lambda size: Joining(size, ("normed", "x")))
    joined = hf.graph[f"{PREFIX}mlp.proj.input"]
    assert joined.kind is Kind.COPY
    assert joined.inputs == (f"{PREFIX}mlp.norm", f"{PREFIX}post_attention_layernorm")
    assert joined.shape == (64,)
    product = hf.graph[f"{PREFIX}mlp.proj"]
    assert (product.kind, product.inputs) == (Kind.LINEAR, (joined.tap,))


def test_a_copy_of_one_value_is_no_tap():
    """Not even twice the same one, in another width."""
    hf = with_mlp(lambda size: Joining(size, ("normed", "normed")))
    assert f"{PREFIX}mlp.proj.input" not in hf.graph
    assert hf.graph[f"{PREFIX}mlp.proj"].inputs == (f"{PREFIX}mlp.norm",)


def test_a_x_k2(tiny):
    """Latent attention with a gate, after an indexer that chooses the keys."""
    hf = tiny("axk2")
    graph = hf.graph
    joined = graph[f"{PREFIX}self_attn.q_gate_proj.input"]
    assert joined.kind is Kind.COPY
    assert joined.inputs == (f"{PREFIX}self_attn.q_a_layernorm", f"{PREFIX}self_attn.q_a_proj")
    assert graph[f"{PREFIX}self_attn.q_gate_proj"].kind is Kind.LINEAR
    attention = graph[f"{PREFIX}attention"]
    assert (attention.kind, attention.inputs) == (
        Kind.ATTENTION,
        (f"{PREFIX}q_rope", f"{PREFIX}self_attn.key", f"{PREFIX}self_attn.value"),
    )


def test_what_latent_attention_caches(tiny):
    """The key that all heads share is an operation of its own, and those of the heads are copies."""
    hf = tiny("axk2")
    graph, prefix = hf.graph, f"{PREFIX}self_attn."
    shared, key = graph[f"{PREFIX}k_rope"], graph[f"{prefix}key"]
    assert (shared.kind, shared.inputs, shared.shape) == (Kind.ROTARY, (f"{prefix}kv_a_proj_with_mqa",), (1, 4))
    assert (key.kind, key.inputs) == (Kind.COPY, (f"{prefix}kv_b_proj", shared.tap))
    assert graph[f"{PREFIX}k_cache"].inputs == (f"{prefix}kv_a_layernorm",)
    assert graph[f"{PREFIX}v_cache"].inputs == (shared.tap,)


@pytest.mark.parametrize("num_keys", [3, 12, 40])
def test_chosen_keys_are_a_tap_as_wide_as_the_setting(num_keys):
    """By their positions. As few as there are always; in one of the runs; in none."""
    graph = hf_of(tiny_model("axk2", index_topk=num_keys)).graph
    chosen = graph[f"{PREFIX}self_attn.indexer.topk"]
    assert (chosen.kind, chosen.among_tokens, chosen.shape) == (Kind.CHOICE, True, (num_keys,))
    assert set(chosen.inputs) == {f"{PREFIX}self_attn.indexer.{name}" for name in ("wq_b", "k_norm", "weights_proj")}
    assert not any(op.among_tokens for op in graph if op.tap != chosen.tap and "indexer" not in op.tap)


# Parts of it by hand.

LOW = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("rows", "is_mask"),
    [
        ([[0.0, LOW], [LOW, 0.0]], True), ([[0.0, LOW / 2]], True), ([[0.0, LOW * 0.51], [LOW, LOW]], True),
        ([[0.0, LOW * 0.49]], False),
        ([[0.0, 0.0]], False), ([[LOW, 1e-30]], False), ([[1.0, 2.0]], False), ([[-torch.inf, 0.0]], True),
    ],
)  # fmt: skip
def test_what_is_a_mask(rows, is_mask):
    assert _is_mask(torch.tensor(rows)) == is_mask
    assert not _is_mask(torch.tensor(rows).nan_to_num(neginf=0).clamp(-9, 9).to(torch.int64))


def two_requests(differ=(), by=1.0):
    """Rows of two requests of four tokens, whose last differs, and of a third; two elements each."""
    rows = torch.ones(12, 2)
    rows[7], rows[8:] = 5.0, 9.0
    rows[list(differ), 0] += by
    return rows


def test_only_the_last_row_may_see_the_last_token():
    assert _is_causal(two_requests(), 4)
    assert _is_causal(two_requests(differ=[3, 11]), 4)
    for at in (0, 2, 4, 6):
        assert not _is_causal(two_requests(differ=[at]), 4)
    assert _is_causal(two_requests(differ=[2, 6], by=torch.nan), 4), "both are not finite"
    assert not _is_causal(two_requests(differ=[2], by=torch.inf), 4)
    assert _is_causal(two_requests(differ=[0]).to(torch.int64), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_the_same_to_some_roundings(dtype):
    rows = two_requests().to(dtype)
    limit = min(_SAME, _SAME_ROUNDINGS * torch.finfo(dtype).eps) * 2**0.5  # of the norm of a row
    for share, is_causal in ((0.9, True), (1.3, False)):
        off = rows.clone()
        off[1, 1] += share * limit
        assert _is_causal(off, 4) == is_causal


def sizes_of(parameters=(), **config):
    tensors = [torch.zeros(shape, device="meta") for shape in parameters]
    return SimpleNamespace(model=SimpleNamespace(parameters=lambda: tensors), config=SimpleNamespace(**config))


@pytest.mark.parametrize(
    ("num_experts", "expected"),
    [(None, 3), (4, 3), (3, 5), (6, 5), (15, 7), (105, 11), (3 * 5 * 7 * 11, 13), (3 * 5 * 7 * 11 * 2, 13)],
)
def test_requests_divide_no_number_of_experts(num_experts, expected):
    config = {} if num_experts is None else {"num_local_experts": num_experts, "experts_shared": 0}
    assert unmistakable_sizes(sizes_of(**config))[0] == expected


def test_numbers_of_tokens_are_no_size_of_the_models():
    requests, (few, more) = unmistakable_sizes(sizes_of())
    for taken in (few, few * requests, more, more * requests):
        for hf in (sizes_of([(taken, 2)]), sizes_of([(2, taken)]), sizes_of(hidden_size=taken)):
            _, lengths = unmistakable_sizes(hf)
            assert taken not in {n * times for n in lengths for times in (1, requests)}
    assert unmistakable_sizes(sizes_of(name="text", scale=float(few), flag=True))[1] == (few, more)
    assert few != more


def of(*sources, ran=()):
    return Origin(tuple(sources), tuple(ran))


def value(source, origin, width=2):
    return Shown(source=source, origin=origin, token_dim=1, rows=torch.zeros(3, width))


def test_a_value_that_is_another_as_a_whole_is_its_alias():
    seen = ForwardTrace(1, 3)
    seen.shown = {"a": value("a", of())}
    seen.aliases = {"b": "a"}
    assert seen._shown_already(of("a"), 2) == seen._shown_already(of("b"), 2) == "a"
    assert seen._shown_already(of("a"), 1) is None, "a part"
    assert seen._shown_already(of("a", ran=["add"]), 2) is None
    assert seen._shown_already(of("a", "c"), 2) is None
    assert seen._shown_already(of(), 2) is None
    assert seen._shown_already(of("c"), 2) is None
    assert value("a", of(), 5).width == 5


def test_what_is_computed_from_a_value_that_is_left_out_comes_from_what_is_behind_that():
    shown = {
        "a": value("a", of()), "left": value("left", of("a", "b", ran=["mul"])), "b": value("b", of()),
        "more": value("more", of("left", "unseen")), "end": value("end", of("more", "b", ran=["add"])),
    }  # fmt: skip
    kept = {name: shown[name] for name in ("a", "b", "end")}
    bridged = dict(_bridged(shown, kept))
    assert list(bridged) == ["a", "b", "end"]
    assert bridged["end"].origin.sources == ("a", "b", "unseen")
    assert bridged["end"].origin.operations[-1] == "add"
    assert bridged["a"].origin == of()
