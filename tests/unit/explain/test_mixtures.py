"""Mixtures of experts and states, in families that the reference engine does not serve: HF's copy is made wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.case import RequestSpec
from harness.compare import compare_run
from harness.engines.hf import HFEngine
from harness.explain import explain_run
from harness.jobs.check import record_run
from harness.oracle.make_golden import make_golden
from harness.oracle.model import load_model
from harness.plan import plan_request
from harness.recording import Recording

from ..tiny_models import save, tiny_model

LENGTHS, NUM_NEW = (21, 11), 4


class Subject:
    """A family with its golden, and HF as the engine, with something wrong in it."""

    def __init__(self, family: str, folder: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        save(tiny_model(family), folder / "model")
        self.folder = folder
        prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]
        self.plan = plan_request(
            model=str(folder / "model"), engine="hf", dtype="float32", device="cpu", max_new_tokens=NUM_NEW,
            requests=[RequestSpec(token_ids=prompt) for prompt in prompts], schedules=["plain"], local_files_only=True,
        )  # fmt: skip
        self.oracle = load_model(self.plan.folder, dtype=torch.float32, stays=True)
        self.golden = make_golden(self.oracle, self.plan.prompts, folder / "golden")

    def cause(self, name: str, break_it: Callable[[torch.nn.Module], None]) -> tuple[str, bool]:
        """Return the cause that is given for an engine that `break_it` made wrong, and whether it is asserted."""
        engine = HFEngine(load_model(self.plan.folder, dtype=torch.float32, stays=True), None)
        engine.match_taps(self.oracle.graph)  # before it is broken: what is left out is a tap all the same
        break_it(engine._hf.model)
        record_run(self.plan, engine, self.plan.schedules[0], self.golden.requests, self.folder / name)
        with Recording.open(self.folder / name, verify=False) as actual:
            found = compare_run(actual, self.golden, hf=self.oracle)
            first = explain_run(found, actual, self.golden, self.oracle).first_divergence
        assert first is not None
        assert first.explanation is not None
        return first.explanation.cause, first.explanation.is_cause


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    made = {}

    def subject(family: str) -> Subject:
        if family not in made:
            made[family] = Subject(family, tmp_path_factory.mktemp(family))
        return made[family]

    return subject


def _shared(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Add routed and shared experts' outputs, and the gate's, by `change`."""

    def break_it(model: torch.nn.Module) -> None:
        block = model.model.layers[0].mlp

        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            x = hidden_states.view(-1, hidden_states.shape[-1])
            shared = block.shared_expert(x)
            _, weights, chosen = block.gate(x)
            return change(block.experts(x, chosen, weights), shared, block.shared_expert_gate(x)).view_as(hidden_states)

        block.forward = forward

    return break_it


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("the shared expert is not added", lambda routed, shared, gate: routed),
        ("the shared expert is added without its gate", lambda routed, shared, gate: routed + shared),
        (
            "the gate of the shared expert is used without a sigmoid",
            lambda routed, shared, gate: routed + shared * gate,
        ),
        (
            "the output of the shared expert is scaled by 0.5",
            lambda routed, shared, gate: routed + 0.5 * shared * gate.sigmoid(),
        ),
    ],
)
def test_shared_experts(subjects, request, cause, change):
    assert subjects("qwen2_moe").cause(request.node.callspec.id, _shared(change)) == (cause, True)


def _set(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.nn.Module], None]:
    def break_it(model: torch.nn.Module) -> None:
        parameter = model.get_parameter(path)
        parameter.data = change(parameter.data)

    return break_it


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x[[1, 0, 2, 3]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_swapped_experts_of_any_family(subjects, family):
    def break_it(model: torch.nn.Module) -> None:
        for parameter in model.model.layers[1].mlp.experts.parameters():
            parameter.data = _swapped(parameter.data)

    assert subjects(family).cause("swapped", break_it) == ("experts 0 and 1 are swapped", True)


def _forgetful(model: torch.nn.Module) -> None:
    """The mixer of the first layer begins every step with an empty state."""
    mixer = model.backbone.layers[0].mixer
    forward = mixer.forward
    mixer.forward = lambda hidden_states, cache_params=None, **rest: forward(hidden_states, **rest)


_MIXER = "backbone.layers.0.mixer."


@pytest.mark.parametrize(
    ("cause", "break_it"),
    [
        ("the state is not carried from one step to the next", _forgetful),
        ("the decay of the state is scaled by 1.3", _set(f"{_MIXER}A_log", lambda x: x + torch.tensor(1.3).log())),
        ("A_log is scaled by 1.1", _set(f"{_MIXER}A_log", lambda x: x * 1.1)),
        ("D is zero: left out, or not loaded", _set(f"{_MIXER}D", torch.zeros_like)),
        ("the sign of dt_proj.bias is wrong", _set(f"{_MIXER}dt_proj.bias", torch.neg)),
        ("the sign of conv1d.weight is wrong", _set(f"{_MIXER}conv1d.weight", torch.neg)),
    ],
)
def test_states(subjects, request, cause, break_it):
    found, is_cause = subjects("mamba").cause(request.node.callspec.id, break_it)
    assert (cause in found, is_cause) == (True, True), found


def test_a_state_that_nothing_known_explains(subjects):
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    _, is_cause = subjects("mamba").cause("noise", _set(f"{_MIXER}A_log", lambda x: x + 0.5 * noise))
    assert not is_cause
