"""What a state that is read back is, instead of the one after its position; of sound engines nothing is said."""

from dataclasses import replace

import pytest
import torch

from harness.errors import Code
from harness.extensions.faults.zoo.models import save
from harness.extensions.faults.zoo.quiet import quiet
from harness.judge.explain import power_of
from harness.results.check import Outcome
from tests.families import states
from tests.families.states import FAULTS, SCHEDULES, Faulty, Subject, held

LENGTHS, NUM_NEW = (13, 9), 5


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """Return a family as a subject, with prompts of their own where it is asked for."""
    made = {}

    def subject(family, **hypotheses):
        key = family, *map(str, hypotheses.items())
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            with quiet():
                save(family, folder / family)
            made[key] = Subject(family, "float32", folder, **{"lengths": LENGTHS, "num_new": NUM_NEW, **hypotheses})
        return made[key]

    return subject


CAUSES = {
    "not restored after a hit": "was not restored after a hit: it begins with zero at position 12",
    "recurrence not restored": "restored without the recurrent state: it begins with zero at position 12, though the "
    "convolution's was restored",
    "tail not restored": "restored without the tail: it begins with zero at position 12, though the recurrent state "
    "was restored",
    "another prompt's snapshot": "is the state of request 0, position 11",
    "snapshot a position early": "is the state of position 10: position 11 is not in it",
    "lost at the end of a chunk": "is zero: it was never written, or it was cleared",
    "not updated in decode": "is not updated in decode: it is the state at the end of the prompt",
    "a step late": "is a step late: the rows of the latest step are not in it",
    "one row twice": "position 15 is in it twice",
    "rejected drafts stay": "rejected drafts are in it, from position ",
    "taken-back tokens stay": "tokens that were taken back are in it, from position 13 on",
    "requests exchanged": "is the state of request 1, position 8",
}
"""By the name of a fault: what is said of it."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CAUSES)
def test_a_state_with_other_rows_in_it_is_named_where_it_was_read_first(subjects, name):
    (fault,) = (item for item in FAULTS if item.name == name)
    run = subjects("falcon_h1").check(fault.schedule, fault.decoder())
    first = run.first_divergence
    assert first.code is Code.STATE_DIFFERS
    assert first.phase == "readback"
    assert first.explanation.is_cause
    assert first.explanation.cause.startswith(CAUSES[name])


def test_padding_that_enters_a_state_is_named(subjects):
    (fault,) = (item for item in FAULTS if item.name == "padding enters")
    run = subjects("mamba").check(fault.schedule, fault.decoder())
    said = {finding.explanation.cause for finding in run.findings if finding.explanation is not None}
    assert any("padding is in it: rows of token 0 before the prompt" in cause for cause in said)


def test_the_output_of_a_scan_is_said_to_follow_from_its_state(subjects):
    (fault,) = (item for item in FAULTS if item.name == "another's state at the start")
    first = subjects("falcon_h1").check(fault.schedule, fault.decoder()).first_divergence
    assert first.tap == "model.layers.0.mamba.out_proj.input"
    assert first.explanation.cause == "model.layers.0.recurrent_state begins with what request 0 left"


@pytest.mark.parametrize("name", ["scaled by 1.01", "columns rolled"])
def test_what_no_other_rows_give_is_found_and_not_named(subjects, name):
    (fault,) = (item for item in FAULTS if item.name == name)
    first = subjects("falcon_h1").check(fault.schedule, fault.decoder()).first_divergence
    assert first.code is Code.STATE_DIFFERS
    assert not first.explanation.is_cause


def test_what_a_sound_state_would_have_shown(subjects, monkeypatch):
    kept = []

    def powered(comparison, *rest):
        sound = {tap: rows for tap, rows in comparison.sound.items() if tap.endswith("_state")}
        kept.append(power_of(replace(comparison, sound=sound), *rest))
        return comparison.result

    monkeypatch.setattr(states, "explain_run", powered)
    subjects("falcon_h1").check("plain")
    (power,) = kept
    assert len(power.tried) == 2
    assert not power.failures
    shown = {item.mistake for item in power.mistakes if item.tap.endswith("recurrent_state") and item.is_seen}
    for cause in ("is zero: ", "is not updated in decode: ", "begins with what request 0 left"):
        assert any(name.startswith(cause) for name in shown), cause
    assert any(item.mistake.startswith("padding is in it") and not item.is_seen for item in power.mistakes), "none fits"


class Wider(Faulty):
    """Keeps its states in float64, in another layout of memory."""

    @property
    def states(self):
        """The same states."""
        return {
            key: state.double().transpose(-1, -2).contiguous().transpose(-1, -2)
            for key, state in super().states.items()
        }


SOUND = {
    **{schedule: (schedule, {}) for schedule in SCHEDULES},
    "a prompt shorter than the kernel": ("plain", {"lengths": (2, 3)}),
    "the same prompt twice": ("batched", {"seeds": (0, 0), "lengths": (9, 9)}),
    "in float64": ("plain", {"decoder": Wider}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
def test_sound_states_pass(subjects, family, name):
    schedule, hypotheses = SOUND[name]
    prompts = {key: value for key, value in hypotheses.items() if key != "decoder"}
    decoder = {"decoder": hypotheses["decoder"]} if "decoder" in hypotheses else {}
    run = subjects(family, **prompts).check(schedule, **decoder)
    assert [finding.message for finding in run.findings] == []
    assert run.outcome is Outcome.PASS
    assert sum(tap.num_rows for tap in run.taps if "_state" in tap.name) > 0


class Narrow(Faulty):
    @property
    def states(self):
        """States without their last two columns: a convolution's may lack one."""
        return {key: state[..., :-2] for key, state in super().states.items()}


class Integers(Faulty):
    @property
    def states(self):
        """States as numbers of 64 bits."""
        return {key: state.long() for key, state in super().states.items()}


class Silent(Faulty):
    @property
    def states(self):
        """No states from the third piece on."""
        return super().states if len(self.pieces) < 3 else {}


@pytest.mark.parametrize(
    ("decoder", "code", "words"),
    [
        (Narrow, Code.TAP_MISMATCH, "shape of model.layers.0.conv_state differs: expected [192, 4], actual [192, 2]"),
        (Integers, Code.TAP_MISMATCH, "dtype of model.layers.0.conv_state is I64, expected a floating-point dtype"),
        (
            Silent,
            Code.ROWS_MISSING,
            "2 rows of model.layers.0.conv_state are missing, the first at request 0, position",
        ),
    ],
)
def test_states_of_another_form_and_missing_ones_are_findings(subjects, decoder, code, words):
    run = subjects("falcon_h1").check("plain", decoder, explains=False)
    assert any(finding.code is code and words in finding.message for finding in run.findings), [
        finding.message for finding in run.findings
    ]


def test_a_state_that_is_not_finite_is_found(subjects):
    class Broken(Faulty):
        def after_piece(self, before):
            if len(self.pieces) == 5:
                for item in held(self, "recurrent"):
                    item.fill_(torch.nan)

    first = subjects("falcon_h1").check("plain", Broken).first_divergence
    assert (first.tap, first.code) == ("model.layers.0.recurrent_state", Code.STATE_DIFFERS)
