"""A quantised KV cache: sound ones pass as declared, and wrong scales are found where they are, and named."""

import pytest

from tests.quantised_cache_faults import FORMATS, Format, checked, faults, named

INT8 = Format("int8", "tensor")
PLANTED = [(form, fault) for form in FORMATS for fault in faults(form)]


@pytest.mark.parametrize(
    "form", [INT8, *(pytest.param(item, marks=pytest.mark.slow) for item in FORMATS if item != INT8)]
)
def test_a_sound_cache_passes_as_declared(form):
    trial = checked(form, form.keep, dtype="bfloat16", schedule="chunked")
    assert not trial.is_alarm
    assert trial.result is not None
    conventions = {tap.name: tap.convention for tap in trial.result.runs[0].taps}
    kept = conventions["model.layers.0.k_cache"]
    assert kept is not None
    has_scale = form.name != "mxfp4"
    assert kept.startswith(f"kept in {form.name}" + (" with a scale" if has_scale else ", as declared"))
    assert "as declared" in kept
    is_clipped = (
        form.share in ("tensor", "head") or form.name == "nvfp4"
    )  # the calibration's largest keys are smaller than these
    assert ("numbers are clipped" in kept) == is_clipped


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        pytest.param(
            form, fault, id=f"{form.name}-{form.share}-{fault[0]}", marks=[pytest.mark.slow] if at % 40 else []
        )
        for at, (form, fault) in enumerate(PLANTED)
    ],
)
def test_wrong_scales_are_named_at_their_place(form, fault):
    _, change, tap, cause = fault
    score = named(checked(form, change), tap, cause)
    assert (score["detected"], score["localised"]) == (True, True)
    # The largest number of a token becomes 127 or a little less, as its quotient is rounded: cut off, it is either.
    is_undecided = fault[0] == "cut off" and form.share.startswith("token")
    assert score["named"] == "yes" or (is_undecided and score["named"] == "no"), score["cause"]


def test_attention_that_leaves_declared_scales_out_is_not_excused():
    """Without them it is what the same format without a scale makes: right only where none is declared."""
    form = FORMATS[0]
    change = next(change for name, change, _, _ in faults(form) if name == "scale is 1, both")
    result = checked(form, change).result
    assert result is not None
    (attention,) = (finding for finding in result.runs[0].findings if finding.tap == "model.layers.1.attention")
    assert attention.explanation is not None
    assert "keys and values have a scale of 1: theirs is not delivered" in attention.explanation.cause
