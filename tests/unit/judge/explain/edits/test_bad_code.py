"""Code of HF that cannot be read, has effects of its own, or fails in a trial: nothing of a trial stays."""

import types

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.zamba.modeling_zamba import ZambaMLP

import harness
from harness.extensions.faults.zoo.models import build
from harness.judge.explain.core.rerun import Rerun
from harness.judge.explain.edits.code import code_of

MLP = "model.layers.1.mlp"


def held_by(model):
    """What modules and their classes hold, by name, and the values of tensors."""
    holders = [*model.modules(), *{type(module) for module in model.modules()}]
    tables = [{name: item for name, item in vars(holder).items() if name[:2] != "__"} for holder in holders]
    return tables, [x.clone() for x in (*model.parameters(), *model.buffers())]


def assert_as_before(model, before):
    tables, tensors = held_by(model)
    assert [table.keys() for table in tables] == [table.keys() for table in before[0]]
    for table, original in zip(tables, before[0], strict=True):
        assert all(table[name] is item for name, item in original.items() if name != "_forward_pre_hooks")
    assert all(torch.equal(*pair) for pair in zip(tensors, before[1], strict=True))


@pytest.fixture
def trials(monkeypatch):
    """The runs under a change, each by the module that is changed; `fail` is called in each."""
    seen, run = [], Rerun.run

    def watched(self, forced=None):
        changed = [module for module in self.hf.model.modules() if "forward" in vars(module)]
        if changed:
            watched.model = self.hf.model
            seen.append(changed[0])
            watched.fail()
        return run(self, forced)

    watched.fail, watched.seen = lambda: None, seen
    monkeypatch.setattr(Rerun, "run", watched)
    return watched


def explain(bench, tap=f"{MLP}.act"):
    return bench.explain(tap, bench.tap(tap).roll(1, dims=1) ** 3)


def failing(error):
    def fail():
        raise error

    return fail


def test_an_exception_in_a_trial_is_of_the_trial_alone(bench, trials):
    before, trials.fail = held_by(bench.hf.model), failing(RuntimeError("in a trial"))
    assert "in a trial" not in str(explain(bench))
    assert len(trials.seen) > 20
    assert_as_before(bench.hf.model, before)


def test_an_interrupt_in_a_trial_ends_the_search(bench, trials):
    before, trials.fail = held_by(bench.hf.model), failing(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        explain(bench)
    assert len(trials.seen) == 1
    assert_as_before(bench.hf.model, before)


def test_what_layers_share_is_as_before(tmp_path, trials):
    """Two layers of Zamba have one block. Trials run on the model of the harness, which is not the engine's."""
    engine, models = build("zamba", seed=7), list[torch.nn.Module]()
    engine.save_pretrained(tmp_path)
    forward, trials.fail = ZambaMLP.forward, lambda: models.append(trials.model)
    for module in engine.modules():
        if isinstance(module, ZambaMLP):
            module.forward = lambda x, inner=module.forward: 3 * inner(x).roll(1, -1) ** 3
    harness.check(engine, model=tmp_path, prompts=[[5, 17, 99, 23]], max_new_tokens=2, schedules=["plain"])
    (model,) = set(models)
    assert ZambaMLP.forward is forward
    assert not any("forward" in vars(module) for module in model.modules())
    shared = [module for module in model.modules() if isinstance(module, ZambaMLP)]
    assert len(shared) > 1
    assert len({module.down_proj.weight.data_ptr() for module in shared}) == 1
    held = dict(engine.named_parameters())
    assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())


def counting(self, x):
    self.calls.append(x.shape)
    self.number += 1
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_effects_of_trials_do_not_add_up(bench, trials, monkeypatch):
    as_of_hf = types.FunctionType(counting.__code__, {"__name__": Qwen3MLP.__module__})
    monkeypatch.setattr(Qwen3MLP, "forward", as_of_hf)
    modules = [bench.hf.module(f"model.layers.{at}.mlp") for at in bench.hf.graph.layers]
    for module in modules:
        module.calls, module.number = [], 0
    try:
        explain(bench)
        counts = [(len(module.calls), module.number) for module in modules]
    finally:
        for module in modules:
            del module.calls, module.number
    assert sum(type(module) is Qwen3MLP for module in trials.seen) > 20
    assert all(calls == number < 10 for calls, number in counts), counts


def without_source():
    space = {"__name__": "transformers.models.made"}
    exec("def forward(self, x):\n    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))", space)
    return space["forward"]


def remote(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Compiled:
    """A forward that is no function of Python, as that of a compiled file."""

    __module__ = "transformers.models.made"

    def __get__(self, module, _kind=None):
        return lambda x: remote(module, x)

    def __call__(self, module, x):
        return remote(module, x)


remote.__module__ = "transformers_modules.made.modeling_made"


@pytest.mark.parametrize("forward", [without_source(), remote, Compiled()], ids=["exec", "remote code", "compiled"])
def test_code_that_cannot_be_read_is_passed_over(bench, trials, monkeypatch, forward):
    monkeypatch.setattr(Qwen3MLP, "forward", forward)
    assert code_of(MLP, bench.hf.module(MLP), "forward", vars(Qwen3MLP)["forward"]) is None
    assert "could not be tried" not in explain(bench).detail
    assert not any(type(module) is Qwen3MLP for module in trials.seen)
