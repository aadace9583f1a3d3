"""Two steps in flight: the tokens of an engine that waits, whatever happens to requests between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_engine import EngineConfig, LLMEngine, SamplingParams

from .recorder import Recorder

VOCAB = 97
ACTIONS = ["none", "abort", "fork", "rewind", "suspend", "watch"]


@dataclass(frozen=True)
class Asked:
    """A request, when it comes, and what happens to it once it has made some tokens."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    """Step."""
    action: str
    after: int
    """Tokens."""
    back: int
    """Of these, how many a request that goes back forgets; steps that a suspended one, or an observer, stays."""


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    prompt = draw(st.lists(st.integers(4, 12), min_size=1, max_size=9))
    length = draw(st.integers(1, 9))
    params = SamplingParams(
        max_new_tokens=length,
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 5])),
        seed=draw(st.integers(0, 99)),
        stop_token_ids=draw(st.sampled_from([(), (), range(4, 97, 4), range(4, 97, 9)])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 1.5])),
        num_logprobs=draw(st.sampled_from([None, None, None, 2])),
        logit_bias=draw(st.sampled_from([{}, {7: 2.0}])),
    )
    after = draw(st.integers(1, length))
    back, arrives = draw(st.integers(0, after)), draw(st.integers(0, 6))
    return Asked(prompt, params, arrives, draw(st.sampled_from(ACTIONS)), after, back)


OPTIONS = st.fixed_dictionaries({
    "block_size": st.sampled_from([1, 3, 16]), "max_num_batched_tokens": st.sampled_from([4, 2048]),
    "max_num_seqs": st.sampled_from([1, 2, 8]), "enable_prefix_caching": st.booleans(),
    "num_blocks": st.sampled_from([None, 22]), "num_speculative_tokens": st.sampled_from([0, 0, 0, 2]),
})  # fmt: skip


@dataclass
class Run:
    """Requests driven through an engine; `made` has the tokens of each, forks behind the others, and why it ended."""

    engine: LLMEngine
    asked: list[Asked]
    made: dict[str, list[Any]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    acted: set[str] = field(default_factory=set)
    due: list[tuple[int, Any]] = field(default_factory=list)
    step: int = 0

    def whole(self) -> dict[str, list[Any]]:
        engine, arriving = self.engine, dict(enumerate(self.asked))
        while arriving or self.due or engine.has_unfinished():
            is_idle = not engine.has_unfinished()
            for key in [key for key, item in arriving.items() if is_idle or item.arrives <= self.step]:
                item = arriving.pop(key)
                self.names[engine.add_request(item.prompt, item.params)] = str(key)
            for at, function in [pair for pair in self.due if is_idle or pair[0] <= self.step]:
                self.due.remove((at, function))
                function()
            for output in engine.step():
                made = self.made.setdefault(self.names[output.request_id], [])
                made.append(
                    (
                        output.token_id,
                        output.finish_reason,
                        [token for token, _ in output.logprobs.top[:1]] if output.logprobs else None,
                    )
                )
            for number, name in list(self.names.items()):
                self.act(number, name)
            self.step += 1
        assert engine.pool.num_free == engine.pool.num_usable
        return self.made

    def act(self, number: int, name: str) -> None:
        """Let happen to a request what is to happen, unless it has ended."""
        made, item = self.made.get(name, []), self.asked[int(name.rstrip("'"))]
        has_ended = not made or made[-1][1] is not None
        if name in self.acted or name.endswith("'") or has_ended or len(made) < item.after:
            return
        self.acted.add(name)
        if item.action == "abort":
            self.engine.abort(number)
        elif item.action == "fork":
            self.names[self.engine.fork(number, SamplingParams(max_new_tokens=12, temperature=1.0, seed=5))] = (
                name + "'"
            )
        elif item.action == "rewind":
            kept = len(made) - min(item.back, len(made))
            del made[kept:]
            params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=6)
            self.engine.rewind(number, len(item.prompt) + kept, params)
        elif item.action == "suspend":
            self.engine.suspend(number)
            self.due.append((self.step + item.back, lambda: self.engine.resume(number)))
        elif item.action == "watch":
            self.engine.observer = Recorder()
            self.due.append((self.step + item.back, lambda: setattr(self.engine, "observer", None)))


def ran(folder: Any, asked: list[Asked], **options: Any) -> tuple[dict[str, list[Any]], int]:
    """Return what was made, and how many steps were launched before the one in front of them was read."""
    config = EngineConfig(dtype="float32", debug_checks=True, max_model_len=64, **options)
    with LLMEngine(folder, config) as engine:
        ahead, launch = [], engine.runner.launch

        def counted(chunks: Any, before_R: Any = None) -> Any:
            ahead.append(before_R is not None)
            return launch(chunks, before_R)

        engine.runner.launch = counted  # type: ignore[method-assign]
        return Run(engine, asked).whole(), sum(ahead)


PLAIN = SamplingParams(max_new_tokens=9, ignore_eos=True)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(requests(), min_size=1, max_size=5), options=OPTIONS)
def test_the_tokens_are_those_of_an_engine_that_waits(
    checkpoint: Any, asked: list[Asked], options: dict[str, Any]
) -> None:
    waited, num_waited = ran(checkpoint.folder, asked, **options)
    made, _ = ran(checkpoint.folder, asked, **options, async_scheduling=True)
    assert made == waited
    assert num_waited == 0


@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize("action", ACTIONS)
def test_what_happens_between_two_steps_finds_requests_as_they_were_read(
    action: str, back: int, checkpoint: Any
) -> None:
    asked = [Asked([5, 6], PLAIN, 0, action, 3, back), Asked([7, 8, 9], PLAIN, 0, "none", 1, 0)]
    options = {"block_size": 3, "enable_prefix_caching": True}
    waited, _ = ran(checkpoint.folder, asked, **options)
    made, num_ahead = ran(checkpoint.folder, asked, **options, async_scheduling=True)
    assert made == waited
    assert num_ahead > 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_step_of_decode_is_launched_before_the_one_in_front_is_read(checkpoint: Any, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    asked = [Asked([5, 6, 7], PLAIN, 0, "none", 1, 0), Asked([9], PLAIN, 0, "none", 1, 0)]
    waited, _ = ran(checkpoint.folder, asked, device=device)
    made, num_ahead = ran(checkpoint.folder, asked, device=device, async_scheduling=True)
    assert made == waited
    assert [len(tokens) for tokens in made.values()] == [9, 9]
    assert num_ahead == 8


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 2}], ids=["there is room", "a prompt in pieces"])
def test_a_request_that_comes_while_others_decode_is_not_kept_waiting(checkpoint: Any, limits: Any) -> None:
    with LLMEngine(checkpoint.folder, EngineConfig(dtype="float32", async_scheduling=True, **limits)) as engine:
        engine.add_request([5, 6], SamplingParams(max_new_tokens=40, ignore_eos=True))
        engine.step()
        number = engine.add_request([7, 8, 9], SamplingParams(max_new_tokens=1))
        outputs = [output.request_id for _ in range(6) for output in engine.step()]
        assert number in outputs


@pytest.mark.parametrize(
    "asked",
    [{"num_logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": 1},
     {"forced_token_ids": [7]}, {"stop": "x"}],
)  # fmt: skip
def test_what_the_host_has_to_do_is_waited_for(asked: dict[str, Any], checkpoint: Any) -> None:
    params = SamplingParams(max_new_tokens=4, **asked)
    assert params.needs_host
    if "stop" not in asked:  # the checkpoint has no tokenizer
        assert ran(checkpoint.folder, [Asked([5], params, 0, "none", 1, 0)], async_scheduling=True)[1] == 0


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": "recompute"}, {"num_speculative_tokens": 1}],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_run_ahead_waits(options: dict[str, Any], checkpoint: Any) -> None:
    asked = [Asked([5, 6], PLAIN, 0, "none", 1, 0)]
    assert ran(checkpoint.folder, asked, async_scheduling=True, **options)[1] == 0


def test_a_step_that_fails_in_flight_leaves_the_one_in_front_to_be_computed_again(checkpoint: Any) -> None:
    with LLMEngine(checkpoint.folder, EngineConfig(dtype="float32")) as engine:
        (expected,) = engine.generate([[5, 6]], PLAIN)
    with LLMEngine(
        checkpoint.folder, EngineConfig(dtype="float32", async_scheduling=True, debug_checks=True)
    ) as engine:
        forward = engine.runner.forward
        failing = iter([False, False, True])

        def fails(batch: Any) -> Any:
            if next(failing, False):
                raise OSError("a device fault")
            return forward(batch)

        engine.runner.forward = fails  # type: ignore[method-assign]
        engine.add_request([5, 6], PLAIN)
        tokens = [output.token_id for output in engine.step()]
        with pytest.raises(OSError, match="a device fault"):
            engine.step()
        while engine.has_unfinished():
            tokens += [output.token_id for output in engine.step()]
    assert tuple(tokens) == expected.token_ids
