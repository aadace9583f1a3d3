"""The states that HF's caches hold: where they are, and that one forward leaves what a slow scan does."""

from types import SimpleNamespace

import pytest
import torch

from harness.formats.taps import Kind
from harness.oracle.caches import held_states, keeps_states
from harness.oracle.decode import HFDecoder
from harness.oracle.paired import run_pair
from harness.oracle.precision import PreservePrecision, upcast

IDS = [[3, 9, 14, 27, 33, 5, 6, 41, 12, 50, 2]]


class Nothing:
    """Watches a pair of forwards, and changes nothing."""

    def part_begins(self, call):
        """See `PairObserver`."""

    control = truth = part_begins

    def part_done(self):
        """See `PairObserver`."""


@pytest.mark.parametrize(("family", "mixer"), [("falcon_h1", "mamba"), ("mamba", "mixer")])
def test_each_state_stands_after_the_operations_of_its_mixer(tiny, family, mixer):
    graph = tiny(family).graph
    kept = [op for op in graph if op.kind is Kind.STATE]
    assert [op.site for op in kept] == ["conv_state", "recurrent_state"] * 2
    for op in kept:
        inside = [item.tap for item in graph.of_layer(op.layer) if f"{item.module}.".find(f".{mixer}.") >= 0]
        assert inside[-2:] == [f"{op.tap.rpartition('.')[0]}.{name}" for name in ("conv_state", "recurrent_state")]
        assert op.inputs == graph[inside[0]].inputs


def test_a_family_without_states_has_none(tiny):
    assert not keeps_states(tiny("llama"))
    assert not [op for op in tiny("llama").graph if op.kind is Kind.STATE]


def test_tokens_beside_the_states_are_none():
    """As qwen4_exp keeps the latest ones for its n-grams."""
    layer = SimpleNamespace(conv_states={0: torch.ones(1, 2, 3), 2: torch.ones(1, 1, 3, dtype=torch.int64)},
                            recurrent_states={}, conv_kernel_size={0: 2, 2: 3})  # fmt: skip
    states = held_states(SimpleNamespace(layers=[layer]))
    assert {key: tuple(state.shape) for key, state in states.items()} == {(0, "conv_state"): (1, 2, 2)}


def test_states_in_modules_are_no_taps(tiny):
    hf = tiny("recurrent_gemma")
    assert keeps_states(hf)
    assert not [op for op in hf.graph if op.kind is Kind.STATE]
    with HFDecoder(hf) as decoder:
        decoder.feed(IDS)
        with pytest.raises(ValueError, match="keeps states in its modules, and not in its cache"):
            decoder.snapshot()


@pytest.mark.parametrize("family", ["falcon_h1", "mamba"])
def test_one_forward_leaves_the_state_of_a_slow_scan(tiny, family):
    """The truth of a position is one forward; token by token HF goes on from each state, in the same precision."""
    hf = tiny(family)
    control, truth = run_pair(hf, torch.tensor(IDS), Nothing(), truth_dtype=torch.float64, use_cache=True)
    assert torch.float64 not in {state.dtype for state in held_states(control).values()}
    whole = held_states(truth)
    with HFDecoder(hf) as decoder, PreservePrecision(torch.float64), upcast(torch.float64, hf.model):
        for token in IDS[0]:
            decoder.feed([[token]])
        slow = decoder.states
    assert {state.dtype for state in (*whole.values(), *slow.values())} == {torch.float64}
    assert whole.keys() == slow.keys()
    for key, state in whole.items():
        assert float((state - slow[key]).norm() / state.norm()) < 1e-12, key


def test_a_snapshot_stays_as_it_was(tiny):
    hf = tiny("falcon_h1")
    with HFDecoder(hf) as decoder:
        decoder.feed(IDS)
        kept, before = decoder.snapshot(), {key: state.clone() for key, state in decoder.states.items()}
        after = decoder.feed([[7]])
        decoder.restore(kept)
        assert all(torch.equal(state, before[key]) for key, state in decoder.states.items())
        assert torch.equal(decoder.feed([[7]]), after)
        decoder.restore(kept)
        assert all(torch.equal(state, before[key]) for key, state in decoder.states.items())


def test_a_convolution_that_records_its_past_has_a_state_as_long_as_its_kernel(tiny):
    hf = tiny("falcon_h1")
    with HFDecoder(hf) as decoder:
        decoder.feed(IDS)
        usual = decoder.states
    with HFDecoder(hf) as decoder:
        decoder.keep_past()
        decoder.feed(IDS)
        assert next(iter(decoder.cache.values())).layers[0].conv_states[0].shape[-1] == len(IDS[0])
        assert {key: state.shape for key, state in decoder.states.items()} == {k: s.shape for k, s in usual.items()}
