"""States that a live engine shows after its steps: of HF's own cache here, sound and one position late."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import harness
from harness.engines.by_content import StepEngine
from harness.oracle.caches import cache_argument, cache_of
from harness.results.check import Outcome


class Held:
    """Runs a model of transformers with a cache for each request."""

    def __init__(self, folder, *, late=False):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.held, self.shown, self.late = {}, {}, late

    @torch.no_grad()
    def step(self, work):
        logits = []
        for request, ids, start in work:
            cache = self.held[request] = self.held[request] if start else DynamicCache(config=self.model.config)
            positions = torch.arange(start, start + len(ids))[None]
            options = {cache_argument(self.model.forward): cache}
            output = self.model(input_ids=torch.tensor([ids]), position_ids=positions, **options)
            logits.append(output.logits[0, -1])
            if not (self.late and start):
                self.shown[request] = {
                    layer: {
                        "conv_state": item.conv_states[0][0].clone(),
                        "recurrent_state": item.recurrent_states[0][0],
                    }
                    for layer, item in enumerate(cache.layers)
                }
        return torch.stack(logits)

    def states(self, request):
        return self.shown[request]


def checked(folder, kind, **options):
    """Return an engine that runs such models, and the check of it."""
    engine = StepEngine(lambda: kind(folder, **options), name="held", folder=folder, dtype="float32")
    prompt = [3, 9, 14, 27, 33, 5, 6]
    return engine, harness.check(engine, model=str(folder), prompts=[prompt], max_new_tokens=4, schedules=["plain"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("late", [False, True])
def test_states_of_a_live_engine_are_judged(tiny_folder, late):
    engine, verdict = checked(tiny_folder("falcon_h1"), Held, late=late)
    assert engine.capabilities.keeps_states
    (run,) = verdict.runs
    assert {tap.name for tap in run.taps if "_state" in tap.name} == {
        f"model.layers.{layer}.{name}_state" for layer in (0, 1) for name in ("conv", "recurrent")
    }
    wrong = [finding for finding in run.findings if "conv_state" in (finding.tap or "")]
    assert bool(wrong) == late
    if late:
        assert wrong[0].explanation.cause == "is not updated in decode: it is the state at the end of the prompt"
    else:
        assert run.outcome is Outcome.PASS, [finding.message for finding in run.findings]


class HeldInAnotherLayout(Held):
    """Shows the states as lists, in the layout of mlx-lm: a convolution's without its oldest column, columns first."""

    def states(self, request):
        return {
            layer: [held["recurrent_state"].transpose(-1, -2), held["conv_state"][:, 1:].T, torch.zeros(3, 5)]
            for layer, held in super().states(request).items()
        }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("late", [False, True])
def test_states_in_another_layout_are_found_by_what_they_hold(tiny_folder, late):
    _, verdict = checked(tiny_folder("falcon_h1"), HeldInAnotherLayout, late=late)
    (run,) = verdict.runs
    judged = {tap.name: tap for tap in run.taps if "_state" in tap.name}
    assert set(judged) == {f"model.layers.{at}.{name}_state" for at in (0, 1) for name in ("conv", "recurrent")}
    assert all(tap.num_rows == 4 for tap in judged.values())
    wrong = {finding.tap: finding.explanation.cause for finding in run.findings if "conv_state" in (finding.tap or "")}
    late_ones = [tap for tap in judged if late and "conv" in tap]
    assert wrong == dict.fromkeys(late_ones, "is not updated in decode: it is the state at the end of the prompt")
    assert late or run.outcome is Outcome.PASS, [finding.message for finding in run.findings]


class HeldElsewhere(Held):
    """Shows tensors that are no states of HF's, and in the second layer none."""

    def states(self, request):
        shown = super().states(request)
        return {0: [2 * shown[0]["recurrent_state"], shown[0]["conv_state"]], 1: []}


@pytest.mark.slow
def test_states_that_are_not_found_are_said_to_be_lacking(tiny_folder):
    engine, verdict = checked(tiny_folder("falcon_h1"), HeldElsewhere)
    assert verdict, verdict.text()
    assert {tap.name for tap in verdict.runs[0].taps if "_state" in tap.name} == {"model.layers.0.conv_state"}
    lacking = {item for item in engine.capabilities.unsupported_taps if "_state" in item}
    assert lacking == {"recurrent_state", "model.layers.1.conv_state"}


class Named(nn.Module):
    """HF's modules under HF's names, in a module of somebody's own."""

    def __init__(self, folder):
        super().__init__()
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, self.lm_head, self.scale = whole.model, whole.lm_head, whole.config.lm_head_multiplier

    def forward(self, input_ids, position_ids=None, past_key_values=None):
        cache = {cache_argument(self.model.forward): past_key_values}
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **cache)
        return {"logits": self.lm_head(out.last_hidden_state) * self.scale, "past_key_values": cache_of(out)}


class Unnamed(nn.Module):
    """The same under other names."""

    def __init__(self, folder):
        super().__init__()
        self.inner = Named(folder)

    def forward(self, input_ids, position_ids=None, past_key_values=None):
        return self.inner(input_ids, position_ids, past_key_values)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Named, Unnamed])
def test_the_states_of_a_modules_own_cache_are_judged(tiny_folder, kind):
    folder = tiny_folder("falcon_h1")
    verdict = harness.check(
        kind(folder), model=str(folder), prompts=[[3, 9, 14, 27, 33, 5, 6]], max_new_tokens=3, schedules=["chunked:4"]
    )
    (run,) = verdict.runs
    assert run.outcome is Outcome.PASS, [finding.message for finding in run.findings]
    assert {tap.num_rows for tap in run.taps if "_state" in tap.name} == {4}
