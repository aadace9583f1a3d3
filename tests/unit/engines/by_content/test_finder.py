"""Which tensor of a dump is which tap: sound, with bugs planted, under names that say something and under none."""

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.base.metrics import rounding_unit
from harness.engines.by_content.columns import Columns, Table
from harness.engines.by_content.finder import have_one_size
from harness.engines.by_content.hf_run import run_hf
from harness.engines.by_content.relations import Relations
from harness.engines.by_content.tap_map import TapEvidence
from harness.engines.by_content.tensor_names import TapNames, elsewhere
from harness.engines.tensor_folder import finder_of
from harness.formats.taps import Graph, Kind, Operation
from harness.formats.tensors import NamedTensor
from harness.oracle.model import load_model

PATHS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.act", "model.layers.1.mlp.down_proj", "model.layers.1")
GRAPH = Graph(tuple(Operation(tap=path, kind=Kind.LINEAR, source=path) for path in PATHS))


@pytest.mark.parametrize(
    ("known", "layer", "name"),
    [
        ({0: "model.layers.0.self_attn.o_proj.0"}, 3, "model.layers.3.self_attn.o_proj.0"),
        ({2: "blk-2/attn_out.npy"}, 11, "blk-11/attn_out.npy"),
        ({0: "Tensor.add.2.forward.output.0", 1: "Tensor.add.4.forward.output.0"}, 5, "Tensor.add.12.forward.output.0"),
        ({1: "0017_mul.npy", 3: "0037_mul.npy"}, 2, "0027_mul.npy"),
        ({0: "layer00.pt: attn"}, 1, "layer01.pt: attn"),
    ],
)
def test_a_name_follows_from_those_of_other_layers(known, layer, name):
    assert name in elsewhere(known, layer)


def test_names_that_differ_otherwise_tell_nothing():
    assert list(elsewhere({1: "first.npy", 2: "second.npy"}, 3)) == []
    assert list(elsewhere({0: "a.9.npy", 1: "a.2.npy"}, 4)) == []  # a negative number


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("Pass00000.pt: model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("Module.model.layers.1.mlp.down_proj.Linear.forward.0.output.0.pt", "model.layers.1.mlp.down_proj"),
        ("model_layers_1_mlp_down_proj.npy", "model.layers.1.mlp.down_proj"),
        ("model.layers.1.0", "model.layers.1"),
        ("Module.model.layers.1.mlp.down_proj.Linear.forward.0.input.0.pt", None),
        ("model.layers.12.mlp.down_proj", None),
    ],
)
def test_a_name_is_like_the_tap_with_the_longest_path_in_it(name, tap):
    names = TapNames(GRAPH, [name])
    assert [op.tap for op in GRAPH if names.likeness(name, op) == 2] == ([] if tap is None else [tap])
    assert [op.tap for op in GRAPH if names.like(op)] == ([] if tap is None else [tap])


def test_the_number_of_the_layer_makes_a_name_a_little_like():
    names = TapNames(GRAPH, ["blk.0.attn_q", "blk.7.attn_q"])
    assert [names.likeness(f"blk.{layer}.attn_q", GRAPH[PATHS[0]]) for layer in (0, 7)] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_norm_has_divided_has_one_size_in_the_dtype_that_it_divides_in(dtype):
    rows = torch.randn(200, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    divided = rows * torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + 1e-6)
    assert have_one_size(divided, rounding_unit(dtype))
    assert not have_one_size(rows, rounding_unit(dtype))


IDS = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40, 7, 7, 90, 31]
MODELS = ("qwen2-tiny", "gemma3-tiny", "qwen3-moe-tiny")


@dataclass
class Dump:
    """What HF computes with a bug in it."""

    graph: object
    taps: dict[str, torch.Tensor]
    tensors: list[NamedTensor]

    def shown(self):
        """Return the taps whose values are among the tensors."""
        values = [
            tensor.tensor.reshape(len(IDS), -1) for tensor in self.tensors if tensor.tensor.numel() % len(IDS) == 0
        ]
        return {tap for tap, value in self.taps.items() if any(same(value, item) for item in values)}


def same(a, b):
    return a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def dump(folder, *, dtype=torch.float32, plant=lambda model: None, named=True, taps=False):
    """Dump the outputs of all modules, and other taps if they are wanted."""
    hf = load_model(folder, dtype=dtype, stays=True)
    graph = hf.graph
    plant(hf.model)
    shown, values = {}, {}

    def hook(name):
        def see(_module, _args, output):
            for place, item in enumerate(output if isinstance(output, tuple) else [output]):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    shown[f"{name}.{place}"] = item.clone()

        return see

    for name, module in hf.model.named_modules():
        module.register_forward_hook(hook(name or "whole"))
    run_hf(hf, torch.tensor([IDS]), lambda op, value: values.update({op.tap: value.clone()}))
    values = {tap: value for tap, value in values.items() if graph[tap].kind is not Kind.CHOICE}
    if taps:
        shown |= {f"own.{tap.replace('layers', 'block')}": value for tap, value in values.items()}
    names = list(shown)
    random.Random(0).shuffle(names)
    tensors = [NamedTensor(name if named else f"t{at:04d}", shown[name]) for at, name in enumerate(names)]
    return Dump(graph, values, tensors)


def finder_of_dump(folder, made, *, rounding=2.5e-8):
    finder = finder_of(made.tensors, load_model(folder, dtype=torch.float32, stays=True), IDS, rounding)
    finder.find()
    wrong = {
        tap: finder.name(tap)
        for tap in finder.chosen
        if not same(finder.rows(tap), made.taps[tap][-len(finder.rows(tap)) :])
    }
    assert wrong == {}, "tensors that are not the taps they were taken for"
    return finder


def by_evidence(finder, evidence):
    return {tap for tap, item in finder.chosen.items() if item.evidence is evidence}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_a_sound_dump_shows_is_found(checkpoints, model, named, dtype):
    made = dump(checkpoints / model, dtype=dtype, named=named, taps=True)
    finder = finder_of_dump(checkpoints / model, made, rounding=2.5e-8 if dtype is torch.float32 else 1.67e-3)
    assert by_evidence(finder, TapEvidence.CONTENT) == set(finder.chosen) == made.shown() == set(made.taps)


@pytest.mark.parametrize("named", [True, False])
def test_what_is_not_in_the_dump_is_not_found(checkpoints, named):
    folder = checkpoints / "qwen2-tiny"
    made = dump(folder, named=named)
    finder = finder_of_dump(folder, made)
    assert set(finder.chosen) == made.shown()
    assert "model.layers.0.attention" not in finder.chosen


def scaled(layers):
    def plant(model):
        for layer in layers:
            model.model.layers[layer].self_attn.scaling *= 1.05

    return plant


def other_eps(model):
    norm = model.model.layers[1].input_layernorm
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, name, getattr(norm, name) + 0.05)


def swapped_heads(model):
    attention = model.model.layers[1].self_attn
    size = attention.head_dim

    def swap(_module, args):
        first, second, *rest = args[0].split(size, dim=-1)
        return (torch.cat([second, first, *rest], dim=-1),)

    attention.o_proj.register_forward_pre_hook(swap)


FAULTS = {
    "scaled attention": (scaled([1]), {"model.layers.1.attention"}),
    "scaled attention in all layers": (scaled([0, 1, 2]), {f"model.layers.{layer}.attention" for layer in range(3)}),
    "another eps": (other_eps, {"model.layers.1.input_layernorm"}),
    "swapped heads": (swapped_heads, {"model.layers.1.self_attn.o_proj"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("model", ["qwen2-tiny", "gemma3-tiny"])
def test_a_bug_does_not_hide_what_follows(checkpoints, model, named, fault):
    plant, wrong = FAULTS[fault]
    made = dump(checkpoints / model, plant=plant, named=named, taps=True)
    finder = finder_of_dump(checkpoints / model, made)
    assert set(finder.chosen) == set(made.taps)
    assert by_evidence(finder, TapEvidence.CONSUMERS) == wrong
    assert by_evidence(finder, TapEvidence.NAME) == set()


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_rows_of_nan_hide_only_themselves(checkpoints, named):
    """A NaN among the values of attention makes all rows NaN: these have nothing but their names."""

    def plant(model):
        def spoil(_module, _args, output):
            output[:, 7] = float("nan")

        model.model.layers[1].mlp.down_proj.register_forward_hook(spoil)

    folder = checkpoints / "qwen2-tiny"
    made = dump(folder, plant=plant, named=named)
    finder = finder_of_dump(folder, made)
    some = {tap for tap in made.shown() if bool(made.taps[tap].isfinite().any())}
    outputs = {tap for tap in made.shown() if ":" not in made.graph[tap].source}
    assert set(finder.chosen) == (outputs if named else some | {"lm_head"})  # no other tensor is as wide
    assert finder.rows("model.layers.1.mlp.down_proj")[7].isnan().all()


def test_a_tensor_of_nan_alone_is_told_by_its_name(checkpoints):
    def plant(model):
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _args, output: output * float("nan"))

    folder = checkpoints / "qwen2-tiny"
    finder = finder_of_dump(folder, dump(folder, plant=plant))
    assert finder.chosen["model.layers.1.mlp.down_proj"].evidence is TapEvidence.NAME


def test_the_last_rows_of_the_head_are_found(checkpoints):
    folder = checkpoints / "qwen2-tiny"
    made = dump(folder)
    made.tensors = [
        NamedTensor(
            tensor.name, tensor.tensor[:, -1] if "lm_head" in tensor.name or "whole" in tensor.name else tensor.tensor
        )
        for tensor in made.tensors
    ]
    finder = finder_of_dump(folder, made)
    assert finder.chosen["lm_head"].is_last_row


def test_in_16_bits_a_bug_that_is_small_in_the_sum_is_found(checkpoints):
    """The residual with the wrong heads is within 24 roundings of HF's, and so no reason to stop at it."""
    folder = checkpoints / "qwen2-tiny"
    made = dump(folder, dtype=torch.bfloat16, plant=swapped_heads, taps=True)
    finder = finder_of_dump(folder, made, rounding=1.67e-3)
    assert set(finder.chosen) == set(made.taps)
    assert by_evidence(finder, TapEvidence.CONSUMERS) == {"model.layers.1.self_attn.o_proj"}


def test_one_tensor_is_one_tap(checkpoints, tmp_path):
    """With a small embedding the residual is nearly what attention adds, and only that is in the dump."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama-tiny", dtype=torch.float32)
    weight = model.model.embed_tokens.weight
    weight.data *= 0.01 / weight.square().mean().sqrt()
    model.save_pretrained(tmp_path)
    made = dump(tmp_path, dtype=torch.bfloat16)
    finder = finder_of_dump(tmp_path, made, rounding=1.67e-3)
    assert set(finder.chosen) == made.shown()
    assert "model.layers.0.attn_residual" not in finder.chosen


def test_what_a_norm_divides_by_its_size_is_not_what_it_reads(checkpoints):
    def triple(model):
        attention = model.model.layers[1].self_attn
        attention.register_forward_hook(lambda _module, _args, output: (3 * output[0], *output[1:]))

    folder, tap = checkpoints / "llama-tiny", "model.layers.1.attn_residual"
    made = dump(folder, plant=triple, taps=True)
    value = made.taps[tap]
    divided = value / value.square().mean(dim=-1, keepdim=True).add(1e-6).sqrt()
    made.tensors = [item for item in made.tensors if not same(item.tensor.flatten(), value.flatten())]
    made.tensors.append(NamedTensor("divided", divided))
    assert tap not in finder_of_dump(folder, made).chosen


@pytest.mark.parametrize(("rounding", "num_contents"), [(2.5e-8, 2), (1.67e-3, 1)])
def test_a_value_before_it_is_rounded_is_the_same_content(checkpoints, rounding, num_contents):
    """numpy has no bfloat16, so that a dump holds float32."""
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32, stays=True)
    rounded = torch.randn(len(IDS), 96).bfloat16().float()
    tables = [Table("before", 1.0001 * rounded), Table("after", rounded)]
    relations = Relations(hf, torch.tensor([IDS]), tables, rounding=rounding, limit=0.01)
    candidates = [relations.candidate(at, Columns(start=0, stop=96)) for at in range(2)]
    assert len({item.content for item in candidates}) == num_contents


def other_theta(model):
    """Change the frequencies of rotary in all layers."""
    for name, frequencies in model.model.rotary_emb.named_buffers():
        if "inv_freq" in name:
            frequencies.copy_(frequencies**1.4)


def neighbours(made):
    """Lay the elements of the heads of queries and keys side by side that rotary turns together."""
    size = made.graph["model.layers.0.q_rope"].shape[-1]
    for at, tensor in enumerate(made.tensors):
        if any(part in tensor.name for part in ("q_rope", "k_rope", "q_proj", "k_proj", "q_norm", "k_norm")):
            pairs = tensor.tensor.reshape(len(IDS), -1, 2, size // 2).transpose(-1, -2)
            made.tensors[at] = NamedTensor(tensor.name, pairs.reshape(len(IDS), -1))


def unnamed(made, keeps):
    """Keep the tensors of some taps under names that say nothing."""
    tensors = [tensor for tensor in made.tensors if tensor.name.startswith("own.") and keeps(tensor.name)]
    made.tensors = [NamedTensor(f"t{at:04d}", tensor.tensor) for at, tensor in enumerate(tensors)]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mistake_in_all_layers_hides_nothing(checkpoints, dtype):
    folder = checkpoints / "llama-tiny"
    made = dump(folder, dtype=dtype, plant=other_theta, named=False, taps=True)
    finder = finder_of_dump(folder, made, rounding=2.5e-8 if dtype is torch.float32 else 1.67e-3)
    assert set(finder.chosen) == set(made.taps)
    wrong = {f"model.layers.{layer}.{site}" for layer in range(3) for site in ("q_rope", "k_rope")}
    assert by_evidence(finder, TapEvidence.CONSUMERS) == wrong


def test_taps_are_found_behind_others_that_were_not_recorded(checkpoints):
    """Neither the embedding nor what stands between an attention and the end of its layer is in the dump."""
    folder = checkpoints / "qwen3-tiny"
    kept = ("o_proj", "down_proj", "output", "input_layernorm", "model.norm")
    made = dump(folder, plant=other_theta, taps=True)
    finder = finder_of_dump(folder, unnamed(made, lambda name: name.endswith(kept)))
    assert set(finder.chosen) == {tap for tap in made.taps if tap.endswith(kept)}


def test_a_wrong_rotation_does_not_hide_the_order_of_elements(checkpoints):
    folder = checkpoints / "qwen3-tiny"
    made = dump(folder, plant=other_theta, taps=True)
    made.tensors = [tensor for tensor in made.tensors if tensor.name.startswith("own.")]
    neighbours(made)
    assert set(finder_of_dump(folder, made).chosen) == set(made.taps)


KEPT = ("output", "model.norm", "lm_head", "embed_tokens")


def test_outputs_of_layers_that_are_all_wrong_are_told_by_names_and_nearness(checkpoints):
    folder = checkpoints / "llama-tiny"
    made = dump(folder, plant=other_theta, taps=True)
    made.tensors = [tensor for tensor in made.tensors if tensor.name.startswith("own.") and tensor.name.endswith(KEPT)]
    finder = finder_of_dump(folder, made)
    assert set(finder.chosen) == {tap for tap in made.taps if tap.endswith(KEPT)}
    assert by_evidence(finder, TapEvidence.CONSUMERS) == {"model.layers.2.output"}


def test_outputs_of_layers_that_are_all_wrong_are_told_by_numbers_in_the_order_of_the_run(checkpoints):
    folder = checkpoints / "llama-tiny"
    made = dump(folder, plant=other_theta, taps=True)
    order = [f"own.{tap.replace('layers', 'block')}" for tap in made.taps]
    made.tensors.sort(key=lambda tensor: order.index(tensor.name) if tensor.name in order else -1)
    finder = finder_of_dump(folder, unnamed(made, lambda name: name.endswith(KEPT)))
    assert set(finder.chosen) == {tap for tap in made.taps if tap.endswith(KEPT)}
    assert by_evidence(finder, TapEvidence.NAME) == {"model.layers.0.output", "model.layers.1.output"}


def test_tensors_that_nothing_tells_are_left(checkpoints):
    folder = checkpoints / "llama-tiny"
    made = unnamed(dump(folder, plant=other_theta, taps=True), lambda name: name.endswith(KEPT))
    finder = finder_of_dump(folder, made)
    values = {tensor.name: tensor.tensor for tensor in made.tensors}
    left = {tap for name in finder.left() for tap, value in made.taps.items() if value is values[name]}
    assert left == {"model.layers.0.output", "model.layers.1.output"}
    assert set(finder.chosen) | left == {tap for tap in made.taps if tap.endswith(KEPT)}


def other_heads(made, of_heads):
    """Lay the heads of some taps in another order: `of_heads` has the order by what the tap's name ends with."""
    tensors = {f"t{at:04d}": (tap, value) for at, (tap, value) in enumerate(made.taps.items())}
    for name, (tap, value) in tensors.items():
        order = next((order for end, order in of_heads.items() if tap.endswith(end)), [0])
        tensors[name] = tap, value.unflatten(1, (len(order), -1))[:, order].flatten(1)
    made.tensors = [NamedTensor(name, value) for name, (_tap, value) in tensors.items()]
    return made


TILED = [0, 2, 1, 3]
QUERIES = {"q_proj": TILED, "q_rope": TILED, "attention": TILED}
KEYS = {"k_proj": [1, 0], "k_rope": [1, 0], "v_proj": [1, 0]}


@pytest.mark.parametrize("plant", [lambda model: None, other_theta, scaled([0, 1, 2])])
def test_context_has_the_heads_of_queries_and_values_those_of_keys(checkpoints, plant):
    folder = checkpoints / "qwen2-tiny"
    made = other_heads(dump(folder, plant=plant), QUERIES | KEYS)
    assert set(finder_of_dump(folder, made).chosen) == set(made.taps)


def test_context_in_an_order_that_queries_do_not_have_is_not_taken(checkpoints):
    folder = checkpoints / "qwen2-tiny"
    made = other_heads(dump(folder), {"attention": TILED})
    assert not [tap for tap in finder_of_dump(folder, made).chosen if tap.endswith("attention")]
