"""Sessions: what they offer to be watched by, and that nothing of a watcher stays."""

import pytest
import torch

from harness.engines.hf import HFSession
from harness.engines.reference.session import ReferenceSession
from harness.engines.stepping import PREPARE, SAMPLE
from harness.errors import Code, HarnessError
from harness.oracle.model import load_model
from harness.profiling.formulas import operation_costs
from harness.profiling.load import ProfileRequests, dry_run
from harness.profiling.roofline import fold
from harness.profiling.trace.tables import site_of
from reference_engine import EngineConfig, LLMEngine

from ..reference_engine.fast.kernels.launching import IGNORE_NUMPY, launch_on


class Watcher:
    def __init__(self, fails_at: str | None = None) -> None:
        self.shapes, self.names, self._fails_at = [], [], fails_at

    def begin_step(self, shape) -> None:
        self.shapes.append(shape)

    def reached(self, name: str) -> None:
        self.names.append(name)
        if name == self._fails_at:
            raise ZeroDivisionError


@pytest.fixture(scope="module")
def model(checkpoints):
    return load_model(checkpoints / "qwen3-tiny", dtype=torch.float32)


@pytest.fixture
def hf(model):
    return HFSession(model, "sdpa")


@pytest.fixture
def reference_session(checkpoints):
    folder = checkpoints / "qwen3-tiny"
    engine = LLMEngine(folder, EngineConfig(dtype="float32", num_blocks=64))
    return engine, ReferenceSession(engine, folder)


def num_hooks(hf) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in hf.model.modules())


def fail_in_a_step(session):
    session.add([1, 2, 3], 4)
    with pytest.raises(ZeroDivisionError), session.watching(Watcher(fails_at="model.layers.1.attention")):
        session.step()
    session.stop()


def test_no_hook_of_a_failed_step_stays(hf, model):
    fail_in_a_step(hf)
    assert num_hooks(model) == 0
    hf.add([1, 2, 3], 4)
    assert list(hf.step())
    assert num_hooks(model) == 0
    hf.stop()
    assert list(hf.cache_tensors()) == []


def test_the_engines_own_observer_is_put_back(reference_session):
    engine, session = reference_session
    before = engine.observer
    fail_in_a_step(session)
    assert engine.observer is before
    assert not engine.has_unfinished()


def test_a_watcher_sees_a_step_from_begin_to_end(reference_session, hf):
    for session in (reference_session[1], hf):
        watcher = Watcher()
        session.add([1, 2, 3], 4)
        with session.watching(watcher):
            session.step()
            session.step()
        session.stop()
        assert [shape.label for shape in watcher.shapes] == ["prefill[bs=1 toks=3 kv=0]", "decode[bs=1 toks=1 kv=3]"]
        assert watcher.names[0] == PREPARE
        assert watcher.names.count(SAMPLE) == 2
        assert watcher.names.count("model.layers.2.mlp.down_proj") == 2


def test_weights_are_those_of_the_checkpoint(reference_session, hf, model):
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    for session in (reference_session[1], hf):
        distinct = {weight.data_ptr(): weight.numel() for weight in session.weights().values()}
        assert sum(distinct.values()) == parameters


def test_hf_takes_no_request_that_would_be_padded(hf):
    hf.add([1, 2, 3], 4)
    with pytest.raises(HarnessError, match="starts together") as caught:
        hf.add([1, 2], 4)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    hf.step()
    with pytest.raises(HarnessError):
        hf.add([1, 2, 3], 4)


@pytest.mark.parametrize("engine", ["reference", "hf"])
def test_every_session_can_be_closed(open_on, engine):
    session = open_on(engine)
    session.add([1, 2, 3], 4)
    session.step()
    session.close()
    if engine == "reference":
        with pytest.raises(HarnessError, match="the engine is closed"):
            session.add([1, 2, 3], 4)


@IGNORE_NUMPY
@pytest.mark.parametrize("model", ["qwen3-tiny", "llama-tiny"])
def test_fused_operations_are_under_the_name_of_the_first(open_on, monkeypatch, model):
    launch_on("cpu", monkeypatch)
    session = open_on("reference", model=model, attention_backend="triton")
    steps = dry_run(session, ProfileRequests(prompts=((1, 2, 3),), max_new_tokens=(2,)))
    names = {site_of(name) for step in steps for name in step.names}
    assert not {"input_layernorm", "post_attention_layernorm", "model.norm"} & names
    assert ("q_rope" in names) is not session.model.has_qk_norm
    costs = operation_costs(session.model, [step.shape for step in steps])
    folded = fold(costs, names)
    assert folded.keys() <= names
    for field in ("flops", "elementwise_flops", "bytes_moved"):
        assert sum(getattr(field_costs, field) for field_costs in folded.values()) == sum(
            getattr(field_costs, field) for field_costs in costs.values()
        )


def test_an_engine_that_replays_graphs_says_what_that_means_for_its_profile(reference_session):
    engine, session = reference_session
    assert session.notes == ()
    engine.runner.kernels.replays_graphs = True
    (note,) = ReferenceSession(engine, session._folder).notes
    assert "replayed as CUDA graphs" in note


@pytest.mark.parametrize("family", ["gpt2", "mamba", "qwen3_moe"])
def test_a_family_that_profiles_do_not_know_is_refused(tiny, family):
    with pytest.raises(HarnessError) as caught:
        HFSession(tiny(family), None)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
