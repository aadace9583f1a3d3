"""Mixtures of experts and states, in families that the reference engine does not serve: HF's copy is made wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.engines.hf import HFEngine
from harness.formats.case import RequestSpec
from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.explain import explain_run
from harness.judge.jobs.opened import record_run
from harness.oracle.make_golden import make_golden
from harness.oracle.model import load_model
from harness.plan import plan_request

from ...tiny_models import save, tiny_model

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
            comparison = compare_run(actual, self.golden, hf=self.oracle)
            first = explain_run(comparison, actual, self.golden, self.oracle).first_divergence
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
        ("the shared experts are not added", lambda routed, shared, gate: routed),
        ("the gate is not applied", lambda routed, shared, gate: routed + shared),
        ("no sigmoid is applied", lambda routed, shared, gate: routed + shared * gate),
        (
            "the output of the shared expert is added with a factor of 0.5",
            lambda routed, shared, gate: routed + 0.5 * shared * gate.sigmoid(),
        ),
    ],
)
def test_shared_experts(subjects, request, cause, change):
    named, is_cause = subjects("qwen2_moe").cause(request.node.callspec.id, _shared(change))
    assert (named.partition(": in ")[0], is_cause) == (cause, True)  # then the line of HF's code


def _set(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.nn.Module], None]:
    def break_it(model: torch.nn.Module) -> None:
        parameter = model.get_parameter(path)
        parameter.data = change(parameter.data)

    return break_it


_BLOCKS = {"llama4_text": "feed_forward"}


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x[[1, 0, 2, 3]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phimoe", "llama4_text"])
def test_swapped_experts_of_any_family(subjects, family):
    def break_it(model: torch.nn.Module) -> None:
        for parameter in model.get_submodule(f"model.layers.1.{_BLOCKS.get(family, 'mlp')}.experts").parameters():
            parameter.data = _swapped(parameter.data)

    assert subjects(family).cause("swapped", break_it) == ("experts 0 and 1 are swapped", True)


def _slots(
    change: Callable[[torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor],
) -> Callable[..., None]:
    """Compute the first block of Llama 4 by `change`, of the shared expert's output, scores [E, T, 1] and experts."""

    def break_it(model: torch.nn.Module) -> None:
        block = model.model.layers[0].feed_forward

        def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            scores, logits = block.router(x)

            def experts(factors: torch.Tensor) -> torch.Tensor:
                return block.experts((x * factors).flatten(0, 1)).unflatten(0, (len(factors), -1))

            return change(block.shared_expert(x), scores.T[..., None], experts), logits

        block.forward = forward

    return break_it


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        (
            "the experts' outputs are added without the router's weights",
            lambda shared, scores, experts: shared + experts((scores > 0).float()).sum(0),
        ),
        (
            "the router's weights are applied to the experts' output instead of their input",
            lambda shared, scores, experts: shared + (experts((scores > 0).float()) * scores).sum(0),
        ),
        (
            "the router's weights are applied twice",
            lambda shared, scores, experts: shared + experts(scores.square()).sum(0),
        ),
        ("the shared expert is not added", lambda shared, scores, experts: experts(scores).sum(0)),
    ],
)
def test_experts_that_read_slots(subjects, request, cause, change):
    assert subjects("llama4_text").cause(request.node.callspec.id, _slots(change)) == (cause, True)


def _forgetful(model: torch.nn.Module) -> None:
    """The mixer of the first layer begins every step with an empty state."""
    mixer = model.backbone.layers[0].mixer
    forward = mixer.forward
    mixer.forward = lambda hidden_states, cache=None, cache_params=None, **rest: forward(hidden_states, **rest)


_MIXER = "backbone.layers.0.mixer."


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cause", "break_it"),
    [
        # The rows that are found first show the convolution's state alone, and cannot tell it from the whole one.
        ("state is not carried from one step to the next", _forgetful),
        (
            "exponential of A_log of backbone.layers.0.mixer is scaled by 1.3",
            _set(f"{_MIXER}A_log", lambda x: x + torch.tensor(1.3).log()),
        ),
        ("A_log of backbone.layers.0.mixer is scaled by 1.1", _set(f"{_MIXER}A_log", lambda x: x * 1.1)),
        ("D of backbone.layers.0.mixer is zero: left out, or not loaded", _set(f"{_MIXER}D", torch.zeros_like)),
        ("bias of backbone.layers.0.mixer.dt_proj has the wrong sign", _set(f"{_MIXER}dt_proj.bias", torch.neg)),
        ("weight of backbone.layers.0.mixer.conv1d has the wrong sign", _set(f"{_MIXER}conv1d.weight", torch.neg)),
    ],
)
def test_states(subjects, request, cause, break_it):
    explanation, is_cause = subjects("mamba").cause(request.node.callspec.id, break_it)
    assert (cause in explanation, is_cause) == (True, True), explanation


def test_a_state_that_nothing_known_explains(subjects):
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    _, is_cause = subjects("mamba").cause("noise", _set(f"{_MIXER}A_log", lambda x: x + 0.5 * noise))
    assert not is_cause


Held = list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]]
"""How the tensors of a state are read and set."""


def _held_wrongly(module: torch.nn.Module, states: Callable[..., Held], is_kept: bool) -> None:
    """Empty the states before every step of one row, or leave them as they were before it."""
    forward = module.forward

    def called(hidden: torch.Tensor, *args: object, **rest: object) -> object:
        held = states(*args, **rest) if hidden.shape[1] == 1 else []
        before = [get().clone() for get, _ in held]
        for (_, put), right in zip(held, before, strict=True):
            put(right if is_kept else torch.zeros_like(right))
        output = forward(hidden, *args, **rest)
        for (_, put), right in zip(held if is_kept else [], before, strict=False):
            put(right)
        return output

    module.forward = called


def _attribute(holder: torch.nn.Module, name: str) -> Held:
    return [(lambda: getattr(holder, name), lambda value: setattr(holder, name, value))]


def _of_block(name: str) -> Callable[..., None]:
    def break_it(model: torch.nn.Module, is_kept: bool) -> None:
        block = model.model.layers[0].temporal_block
        holder = block.rg_lru if name == "recurrent_states" else block
        _held_wrongly(block, lambda *args, **rest: _attribute(holder, name), is_kept)

    return break_it


def _of_list(module: str, numbers: list[int]) -> Callable[..., None]:
    def break_it(model: torch.nn.Module, is_kept: bool) -> None:
        def states(state: list[torch.Tensor], **rest: object) -> Held:
            return [(lambda n=n: state[n][:, :, 0], lambda value, n=n: state[n][:, :, 0].copy_(value)) for n in numbers]

        _held_wrongly(model.get_submodule(module), states, is_kept)

    return break_it


def _of_cache(name: str) -> Callable[..., None]:
    def break_it(model: torch.nn.Module, is_kept: bool) -> None:
        mixer = model.model.layers[0].mamba

        def states(**hypotheses: object) -> Held:
            cache = hypotheses.get("cache", hypotheses.get("cache_params"))
            held = getattr(cache.layers[mixer.layer_idx], f"{name}_states")[0]
            return [(lambda: held, held.copy_)]

        _held_wrongly(mixer, states, is_kept)
        wrong = mixer.forward
        mixer.forward = lambda hidden_states, **rest: wrong(hidden_states, **rest)

    return break_it


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(
    ("family", "state", "plan"),
    [
        ("recurrent_gemma", "the convolution's state", _of_block("conv1d_state")),
        ("recurrent_gemma", "the recurrence's state", _of_block("recurrent_states")),
        ("rwkv", "the state", _of_list("rwkv.blocks.0.feed_forward", [0])),
        ("rwkv", "the state", _of_list("rwkv.blocks.0.attention", [1])),
        ("falcon_h1", "the convolution's state", _of_cache("conv")),
        ("falcon_h1", "the recurrence's state", _of_cache("recurrent")),
    ],
)
def test_one_state_of_several_is_forgotten_or_never_updated(subjects, request, family, state, plan, is_kept):
    explanation, is_cause = subjects(family).cause(request.node.callspec.id, lambda model: plan(model, is_kept))
    meant = "is not updated in decode: every row goes on from the end of the first step"
    if is_kept and family == "falcon_h1":  # its cache is read, and shows it before any row goes on from it
        assert (explanation, is_cause) == ("is not updated in decode: it is the state at the end of the prompt", True)
        return
    assert (explanation, is_cause) == (
        f"{state} {meant if is_kept else 'is not carried from one step to the next'}",
        True,
    )
