"""Drawn faults: the same for a seed, of four kinds, and none that changes nothing. Sizes of errors."""

import re
from dataclasses import replace

import pytest
import torch

from harness.extensions.faults.catalogue import entry_of
from harness.extensions.faults.drawn.draw import KINDS, _place, draw, pattern_of
from harness.extensions.faults.fault import Fault, Variant
from harness.extensions.faults.modules.changes import cache
from harness.extensions.faults.power import (
    DTYPES,
    QUANTITIES,
    SIZES,
    SOUND,
    SmallestError,
    as_table,
    measure,
    power_entry,
)
from harness.extensions.faults.zoo.models import build, logits, tokens
from harness.extensions.faults.zoo.quiet import quiet


@pytest.fixture(scope="module")
def faults():
    with quiet():
        return [draw(3, index) for index in range(5)]


def test_every_kind_is_drawn_and_an_id_makes_the_same_fault_again(faults):
    assert [fault.summary.partition(":")[0] for fault in faults] == list(KINDS)
    for fault in faults:
        again = entry_of(fault.id)
        assert (again.summary, again.setting) == (fault.summary, fault.setting)
    with quiet():
        assert draw(4, 0).summary != faults[0].summary


def test_a_drawn_fault_changes_the_model_it_is_put_into(faults):
    for fault in (faults[1], faults[3]):  # a cache shows in decode, some edits with other inputs
        model, sound = (build(fault.setting.model, seed=7) for _ in range(2))
        fault.inject(model)
        assert not torch.equal(logits(model, tokens()), logits(sound, tokens()))


def test_what_changes_nothing_is_thrown_out(faults):
    assert _place(replace(faults[3], inject=lambda model: None)) is None

    def below_rounding(model):
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 1e-7)

    assert _place(replace(faults[3], inject=below_rounding)) is None


def test_an_engine_that_raises_is_thrown_out(faults):
    def raises(model):
        raise ValueError("not at this size")

    assert _place(replace(faults[3], inject=raises)) is None

    def needs_a_cache(model):
        """Change the logits, and raise in a run without a cache, by which a fault is placed."""
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        sound = model.forward

        def forward(*args, use_cache=None, **kwargs):
            if use_cache is False:
                raise AttributeError("no cache")
            return sound(*args, use_cache=use_cache, **kwargs)

        model.forward = forward

    assert _place(replace(faults[3], inject=needs_a_cache)) is None


@pytest.mark.parametrize(("family", "layer"), [("jamba", 1), ("llama", 0)])
def test_a_slip_of_the_cache_may_be_found_in_the_first_layer_that_has_one(faults, family, layer):
    keys_doubled = cache(
        update=lambda inner, k, v, *rest, **named: inner(2 * k * (k.shape[2] == 1) + k, v, *rest, **named)
    )
    place = _place(replace(faults[3], inject=keys_doubled, setting=replace(faults[3].setting, model=family)))
    assert re.search(place, f"model.layers.{layer}.k_cache")
    assert not re.search(place, "model.layers.2.k_cache")


@pytest.mark.parametrize(
    ("path", "inside", "outside"),
    [
        ("model.layers.0.self_attn", "model.layers.0.attention", "model.layers.1.attention"),
        ("model.layers.0.mlp.act_fn", "model.layers.0.mlp", "model.layers.0.output"),
        ("model.layers.0.activation_fn", "model.layers.0.act", "model.layers.0.output"),
        ("model.rotary_emb", "model.layers.0.q_rope", "model.layers.0.attention"),
        ("model.layers.1", "model.layers.1.attn_residual", "model.layers.10.output"),
        ("", "lm_head", "model.norm"),
    ],
)
def test_the_operations_of_a_module(path, inside, outside):
    assert re.search(pattern_of(path), inside)
    assert not re.search(pattern_of(path), outside)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_larger_error_changes_more(quantity):
    changes = []
    for step in ("0", "4"):
        model, sound = (build("qwen3_moe", seed=7) for _ in range(2))
        entry = power_entry(f"power/{quantity}/float32/{step}")
        assert isinstance(entry, Fault)
        entry.inject(model)
        ids = tokens()
        with torch.no_grad():  # with a cache: one of the quantities is of its slots
            rows = [held(input_ids=ids, use_cache=True).logits for held in (model, sound)]
        changes.append(float((rows[0] - rows[1]).norm()))
    assert changes[0] > changes[1] > 0


class Knows:
    """Questions to a tool that finds errors of at least 1e-3."""

    def ask(self, tool, id):
        entry = power_entry(id)
        is_sound = isinstance(entry, Variant) or SIZES[int(id.rpartition("/")[2])] < 1e-3
        return type("Asked", (), {"answers": {"mine": type("Said", (), {"is_sound": is_sound})}})


def test_the_smallest_error_is_found_by_bisection():
    powers = measure({"mine": ["mine", "absent"]}, Knows())
    assert len(powers) == len(QUANTITIES) * len(DTYPES)
    assert {power.smallest["mine"] for power in powers} == {1e-3}
    assert {power.smallest["absent"] for power in powers} == {None}
    alarming = SmallestError(quantity="eps", dtype="float32", smallest={"mine": 1e-3, "b": None}, alarms=["mine"])
    assert "(1.0e-03)" in as_table([alarming])


@pytest.mark.parametrize("kind", SOUND)
def test_sound_engines_differ_by_rounding_alone(kind):
    model, sound = (build("qwen3_moe", seed=7) for _ in range(2))
    entry = power_entry(f"power/sound/float32/{kind}")
    assert isinstance(entry, Variant)
    if entry.inject is not None:
        entry.inject(model)
    torch.testing.assert_close(logits(model, tokens()), logits(sound, tokens()), rtol=1e-4, atol=1e-4)
