"""Steps of a live engine: what each computes, where it begins and ends, and what its modules show."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.engines.torch_modules import Entry, Fields, ForwardBatch, ModuleRecorder, StepRows, StepWatcher
from harness.engines.torch_modules.recorder import StepRecorder
from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo

P = "model.layers.{layer}."


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Turn(nn.Module):
    def forward(self, position, x):
        x.neg_()
        return x


class Layer(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.norm, self.turn = Double(), turn

    def forward(self, x):
        return self.turn(0, self.norm(x))


class Engine(nn.Module):
    """Two layers that share one module, and an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.arange(10.0)[:, None])
        turn = Turn()
        self.layers = nn.ModuleList([Layer(turn), Layer(turn)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Written:
    """A writer that keeps what it is given, as it is at that moment."""

    def __init__(self):
        self.taps, self.step = {}, None

    def begin_step(self, **step):
        self.step = step

    def tap(self, name, tensor):
        assert name not in self.taps
        self.taps[name] = tensor.clone()


TABLE = (
    Entry(module="embed", token_ids=0, output="model.embed_tokens"),
    Entry(module="layers.{layer}.norm", inputs={"x": P + "input_layernorm.input"}, output=P + "input_layernorm"),
    Entry(module="layers.{layer}.turn", inputs={1: P + "before"}, updated={1: P + "q_rope"}),
)


def rows(**fields):
    return StepRows(**{"phase": "prefill", "request": [0, 0, 0], "position": [0, 1, 2]} | fields)


def run(table, ids=(1, 2, 3), step=None, model=None):
    model, written = model or Engine(), Written()
    recorder = ModuleRecorder(model, table)
    with torch.no_grad(), recorder.step(written, step or rows()):
        model(torch.tensor(ids))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return written


def test_values_before_and_after_a_call_in_place():
    taps = run(TABLE[:1] + TABLE[2:]).taps
    assert list(taps) == [
        "model.embed_tokens", "model.layers.0.before", "model.layers.0.q_rope", "model.layers.1.before",
        "model.layers.1.q_rope",
    ]  # fmt: skip
    assert taps["model.layers.0.before"].flatten().tolist() == [2, 4, 6]
    assert taps["model.layers.0.q_rope"].flatten().tolist() == [-2, -4, -6]
    assert taps["model.layers.1.q_rope"].flatten().tolist() == [4, 8, 12]


def test_one_module_for_all_layers_under_a_path_of_its_own():
    model = Engine()
    model.turn = model.layers[0].turn
    for layer in model.layers:
        del layer._modules["turn"]
        vars(layer)["turn"] = model.turn
    entry = Entry(module="turn", updated={1: P + "q_rope"})
    layers = Entry(module="layers.{layer}.norm", output=P + "input_layernorm")
    taps = run((entry, layers), model=model).taps
    assert {"model.layers.0.q_rope", "model.layers.1.q_rope"} <= set(taps)


def test_rows_of_padding_are_left_out():
    taps = run(TABLE[:1], ids=(9, 1, 2, 3), step=rows(kept=[1, 2, 3], token_ids=[1, 2, 3])).taps
    assert taps["model.embed_tokens"].flatten().tolist() == [1, 2, 3]


def test_requests_side_by_side():
    model = Engine()
    written = Written()
    with ModuleRecorder(model, TABLE[:1]).step(written, rows(request=[0, 0, 1, 1], position=[0, 1, 0, 1])):
        model(torch.tensor([[1, 2], [3, 4]]))
    assert written.taps["model.embed_tokens"].flatten().tolist() == [1, 2, 3, 4]


def test_only_sampled_rows():
    head = Entry(module="embed", output="lm_head", is_sampled_only=True)
    step = run((head,), ids=(5,), step=rows(sampled_rows=[2]))
    assert step.step["partial_rows"] == {"lm_head": [2]}
    assert step.taps["lm_head"].flatten().tolist() == [5]
    assert run((head,), ids=(5,)).taps == {}, "a step that samples nothing has no logits"


def test_a_step_of_one_row_keeps_the_shape_of_a_row():
    """[requests, tokens, size], as vLLM's backend of HF's own modules has it, is [1, 1, size] then."""
    taps, shapes = {}, {}
    writer = SimpleNamespace(tap=lambda name, tensor: taps.setdefault(name, []).append(tuple(tensor.shape)))
    for num_rows in (3, 1, 2):
        step = StepRows(phase="prefill", request=[0] * num_rows, position=range(num_rows))
        StepRecorder(writer, step, shapes).tap("a", torch.zeros(1, num_rows, 8))
    assert taps == {"a": [(3, 8), (1, 8), (2, 8)]}


def test_the_layer_before_and_the_last():
    stream = Entry(module="layers.{layer}.norm", output=Fields("model.layers.{previous}.output"))
    last = Entry(module="embed", output="model.layers.{last}.mlp")
    assert list(run((stream, last)).taps) == ["model.layers.1.mlp", "model.layers.0.output"]


def test_what_the_table_does_not_show(tiny):
    recorder = ModuleRecorder(Engine(), TABLE)
    graph = tiny("llama").graph
    lacking = recorder.unsupported_taps(graph)
    assert {"self_attn.q_proj", "lm_head", "model.norm", "k_rope"} <= set(lacking)
    assert not {"input_layernorm", "q_rope", "model.embed_tokens", "k_cache"} & set(lacking)


@pytest.mark.parametrize(
    ("table", "where", "said"),
    [
        ((Entry(module="layers.{layer}.nrm", output="a"),), "layers.{layer}.nrm", "matches no module"),
        ((Entry(module="layers.{layer}.turn", output=P + "a"), Entry(module="layers.{layer}.norm", output=P + "a")),
         "layers.{layer}.norm", "two values"),
        ((Entry(module="embed", output="a"), Entry(module="embed", output="b")), "embed", "two lines"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_the_modules(table, where, said):
    with pytest.raises(HarnessError, match=said) as caught:
        ModuleRecorder(Engine(), table)
    assert caught.value.code is Code.BAD_MODULE_TABLE
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("table", "step", "said"),
    [
        (TABLE[:1], {"request": [0, 0], "position": [0, 1]}, "other rows"),
        ((Entry(module="layers.{layer}.turn", inputs={4: P + "a"}),), {}, "not given the argument 4"),
        ((Entry(module="layers.{layer}.turn", inputs={"y": P + "a"}),), {}, "not given the argument 'y'"),
    ],
)
def test_a_step_that_does_not_fit_the_table(table, step, said):
    with pytest.raises(HarnessError, match=said) as caught:
        run(table, step=rows(**step))
    assert caught.value.code is Code.BAD_MODULE_TABLE


def test_other_tokens_than_those_that_are_forced():
    with pytest.raises(HarnessError, match="other tokens") as caught:
        run(TABLE[:1], step=rows(token_ids=[1, 2, 4]))
    assert caught.value.code is Code.ENGINE_FAILED
    assert "row 2" in str(caught.value)


def test_no_hook_stays_when_the_engine_raises():
    model = Engine()
    recorder = ModuleRecorder(model, TABLE)
    with pytest.raises(IndexError), recorder.step(Written(), rows()):
        model(torch.tensor([1, 2, 99]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_logits_that_are_computed_and_thrown_away():
    head = Entry(module="embed", output="lm_head", is_sampled_only=True)
    step = run((head,), ids=(5, 6), step=rows(sampled_rows=[2], sampled_kept=[1]))
    assert step.taps["lm_head"].flatten().tolist() == [6]


def test_heads_of_all_rows_one_behind_the_other():
    written, by_head = Written(), torch.arange(12.0).view(6, 2)
    StepRecorder(written, rows()).tap("q_norm", by_head)
    assert torch.equal(written.taps["q_norm"], by_head.view(3, 2, 2))


def test_an_argument_by_its_name_in_the_signature_however_it_is_given():
    by_name = Entry(module="layers.{layer}.turn", inputs={"x": P + "before"})
    assert run((by_name,)).taps["model.layers.0.before"].flatten().tolist() == [2, 4, 6]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, input_ids, positions):
        return self.norm(input_ids[:, None].float())


class PastAllHooks(Model):
    """As a model that vLLM could compile as a whole."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class Watcher(StepWatcher):
    def read_batch(self, arguments):
        positions = arguments["positions"].tolist()
        return ForwardBatch(
            requests=[0], starts=[0, len(positions)], positions=positions, num_padded_rows=len(arguments["input_ids"]),
            slot_mapping=None,
        )  # fmt: skip

    def sampled_tokens(self, output):
        return output


def recorded(model):
    steps, taps = [], []
    writer = SimpleNamespace(
        begin_step=lambda **step: steps.append(step["position"]),
        tap=lambda name, tensor: taps.append((name, tuple(tensor.shape))),
        end_step=lambda sampled: steps.append(sampled),
    )
    sampler, request = nn.Identity(), RequestInfo(id=0, prompt_length=3, token_ids=[5, 6, 7])
    table = [Entry(module="norm", output="model.norm")]
    with Watcher(model, sampler, table, [request], writer):
        model(torch.tensor([5, 6, 7]), positions=torch.arange(3))
        sampler(torch.tensor([9]))
    return steps, taps


@pytest.mark.parametrize("kind", [Model, PastAllHooks])
def test_a_step_begins_with_the_forward(kind):
    model = kind()
    assert recorded(model) == ([[0, 1, 2], [9]], [("model.norm", (3, 1))])
    assert "forward" not in vars(model)
    assert not model.norm._forward_hooks


BATCH = {
    "requests": [7, 8], "starts": [0, 3, 4], "positions": [2, 3, 4, 0], "num_padded_rows": 4,
    "slot_mapping": torch.arange(4), "block_tables": {"0": {7: [5, 6, 0, 0], 8: [9, 0, 0, 0]}},
}  # fmt: skip


def test_padded_rows_of_block_tables_are_cut_behind_the_last_row():
    assert ForwardBatch(**BATCH, block_size=4).tables_in_use == {"0": {7: [5, 6], 8: [9]}}
    assert ForwardBatch(**BATCH, block_size=2).tables_in_use == {"0": {7: [5, 6, 0], 8: [9]}}


def test_rows_are_left_alone_where_no_block_size_is_given():
    assert ForwardBatch(**BATCH).tables_in_use == BATCH["block_tables"]
