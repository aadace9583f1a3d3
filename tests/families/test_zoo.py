"""The zoo is alive, HF runs it but for known failures, and faults show where they are named."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.extensions.faults.placed import FAULTS, PlacedFault, applicable
from harness.extensions.faults.placed.attention import without_oldest
from harness.extensions.faults.placed.plan import set_parameter
from harness.extensions.faults.zoo.divergence import distance as value_distance
from harness.extensions.faults.zoo.divergence import first_difference, tensors_in, trace
from harness.extensions.faults.zoo.models import build, load, logits, save, tokens
from harness.extensions.faults.zoo.tiny_config import tiny_config

from .architectures import NOT_CAUSAL, architectures, excluded
from .behaviour import HF_FAILS, LATE, ROUNDING, behaviour, changed, distance

MEASURED = "5.23"
needs_measured_version = pytest.mark.skipif(
    not transformers.__version__.startswith(MEASURED), reason=f"HF's failures are those of transformers {MEASURED}"
)


@pytest.fixture(scope="module")
def names() -> list[str]:
    return architectures()


def sample(names: list[str], count: int, seed: int) -> list[str]:
    return random.Random(seed).sample(names, count)


def test_every_entry_of_the_mapping_is_an_architecture_or_has_a_reason(names: list[str]) -> None:
    reasons = excluded()

    assert len(names) >= 95
    assert set(names) | set(reasons) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not set(names) & set(reasons)
    assert reasons["bert"].startswith("encoder that can")
    assert reasons["bart"].startswith("encoder-decoder")
    assert reasons["gemma3"] == "counts as gemma3_text"


def test_a_sample_of_families_behaves(names: list[str], subtests: pytest.Subtests) -> None:
    for name in sample(names, 2, seed=0):
        with subtests.test(name):
            assert behaviour(build(name)).problems() == set(HF_FAILS.get(name, {}))


def test_faults_in_a_sample_of_families_show_where_they_are_named(names: list[str], subtests: pytest.Subtests) -> None:
    for name in sample(names, 2, seed=1):
        with subtests.test(name):
            faults = applicable(build(name))
            assert len(faults) >= 3
            assert misplaced(name, faults) == []


@torch.no_grad()
def wrong_by_themselves(sound: nn.Module, faulty: nn.Module, ids: torch.Tensor) -> set[str]:
    """Return the innermost modules of a faulty model that give other results than the sound ones on the same arguments.

    Both are copies of one model. The faulty one runs over ids [1, T]; each sound module is called on what it is given.
    """
    twins = dict(sound.named_modules())
    wrong: set[str] = set()
    handles = []
    for path, module in faulty.named_modules():

        def after(module: nn.Module, args: Any, kwargs: Any, results: Any, path: str = path) -> None:
            if value_distance(tensors_in(results), tensors_in(twins[path](*args, **kwargs))) > 0:
                wrong.add(path)

        if module is not twins[path]:  # some of HF's activations are one object for all models of the process
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        faulty(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {path for path in wrong if not any(is_inside(outer, path) for outer in wrong)}


def is_inside(path: str, outer: str) -> bool:
    return path != outer and (outer == "" or path.startswith(f"{outer}."))


def misplaced(name: str, faults: Iterable[PlacedFault]) -> list[str]:
    """Return a line for each fault that shows first, or makes something wrong, where it does not name it."""
    model = build(name)
    sound, lines = trace(model, tokens()), []
    for fault in faults:
        faulty = build(name)
        fault.inject(faulty)
        first = first_difference(sound, trace(faulty, tokens()))
        wrong = wrong_by_themselves(model, faulty, tokens())
        if first is None or not wrong or not {first.path, *wrong} <= set(fault.sites):
            lines.append(f"{fault.name} names {fault.sites}, shows first at {first}, makes {wrong} wrong")
    return lines


def test_the_seed_decides_about_the_weights() -> None:
    first, again, reseeded = build("llama"), build("llama"), build("llama", seed=1)

    assert torch.equal(logits(first, tokens()), logits(again, tokens()))
    assert not torch.equal(logits(first, tokens()), logits(reseeded, tokens()))


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)

    torch.manual_seed(7)
    build("gpt2")

    assert torch.equal(torch.rand(3), expected)


def test_a_saved_model_is_loaded_as_it_was(tmp_path) -> None:
    save("qwen2_moe", tmp_path)

    assert (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(load(tmp_path), tokens()), logits(build("qwen2_moe"), tokens()))


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("gemma3_text", ["sliding_attention", "full_attention"]),
        ("lfm3", ["conv", "full_attention", "sliding_attention"]),
        ("exaone_moe", ["sliding_attention", "sliding_attention", "full_attention"]),  # dense, sparse, sparse
        ("llama", None),
    ],
)
def test_every_type_of_layer_occurs_once(name: str, types: list[str] | None) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = tiny_config(name)

    assert getattr(config, "layer_types", None) == types
    assert config.num_hidden_layers == len(types or [0, 0])


def test_the_first_difference_is_whose_work_it_is() -> None:
    sound, faulty = build("llama"), build("llama")
    events = trace(sound, tokens())
    assert first_difference(events, trace(faulty, tokens())) is None

    set_parameter(faulty.model.layers[1].mlp.up_proj, "weight", faulty.model.layers[0].mlp.up_proj.weight)
    difference = first_difference(events, trace(faulty, tokens()))
    assert difference is not None
    assert difference.path == "model.layers.1.mlp.up_proj"
    assert difference.size > 0.1

    faulty.model.layers[0].self_attn.scaling *= 2  # earlier, and of no module inside of the attention
    difference = first_difference(events, trace(faulty, tokens()))
    assert difference is not None
    assert difference.path == "model.layers.0.self_attn"


def test_what_is_wrong_by_itself_is_found_however_much_is_wrong_because_of_it() -> None:
    sound, faulty = build("llama"), build("llama")
    assert wrong_by_themselves(sound, faulty, tokens()) == set()

    faulty.model.layers[0].self_attn.scaling *= 2
    faulty.model.layers[1].mlp.act_fn = torch.nn.GELU()

    assert wrong_by_themselves(sound, faulty, tokens()) == {"model.layers.0.self_attn", "model.layers.1.mlp.act_fn"}


def test_what_a_module_returned_can_be_taken_as_given() -> None:
    sound, faulty = build("llama"), build("llama")
    faulty.model.rotary_emb.inv_freq *= 1.1
    events = trace(sound, tokens()), trace(faulty, tokens())

    by_itself, because_of_it = first_difference(*events), first_difference(*events, aside_from="model.rotary_emb")

    assert by_itself is not None
    assert by_itself.path == "model.rotary_emb"
    assert because_of_it is not None
    assert because_of_it.path == "model.layers.0.self_attn"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_shorter_window_hides_the_oldest_key_of_whole_windows_only(dtype: torch.dtype) -> None:
    visible = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)  # a window of 3
    expected = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)  # of 2, which the first two rows do not fill

    actual = without_oldest(as_mask(visible, dtype), 3)

    assert torch.equal(actual, as_mask(expected, dtype))


def as_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask [1, 1, Q, K] of bool, or of addends."""
    if dtype == torch.bool:
        return visible[None, None]
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]


@pytest.mark.slow
@needs_measured_version
def test_every_family_behaves_but_for_known_failures(names: list[str], subtests: pytest.Subtests) -> None:
    for name in names:
        with subtests.test(name):
            assert behaviour(build(name)).problems() == set(HF_FAILS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_what_is_called_not_causal_is_not(name: str) -> None:
    model, ids = build(name), tokens()

    leak = distance(logits(model, changed(ids, LATE))[:LATE], logits(model, ids)[:LATE])

    assert leak > ROUNDING


@pytest.mark.slow
def test_every_fault_shows_where_it_is_named(names: list[str], subtests: pytest.Subtests) -> None:
    plans = {}
    for name in names:
        with subtests.test(name):
            plans[name] = applicable(build(name))
            assert misplaced(name, plans[name]) == []
    assert sum(len(faults) >= 3 for faults in plans.values()) >= 40
    assert {fault.name for faults in plans.values() for fault in faults} == set(FAULTS)


@pytest.mark.slow
def test_faults_can_be_planted_in_bfloat16(names: list[str], subtests: pytest.Subtests, tmp_path) -> None:
    for name in sample([name for name in names if "bfloat16" not in HF_FAILS.get(name, {})], 10, seed=2):
        save(name, tmp_path / name)
        for fault in applicable(build(name)):
            with subtests.test(name, fault=fault.name):
                model = load(tmp_path / name, dtype=torch.bfloat16)
                fault.inject(model)
                assert logits(model, tokens()).isfinite().all()


def test_every_fault_says_what_is_wrong() -> None:
    assert all(places.__doc__ for places in FAULTS.values())
