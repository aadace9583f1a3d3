"""`harness diff` of two recordings in two dtypes: a measurement, whatever it shows, and never a pass."""

import json
import shutil
from itertools import pairwise

import pytest
import torch

from .commands import rewrite

LATER_TAP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def coarse(harness, golden, tmp_path):
    """The tokens of the golden in bfloat16; `recording` has them in float32."""
    out = tmp_path / "bf16"
    assert harness("record", "--golden", golden, "--dtype", "bfloat16", "--out", out).status == 0
    return out


def measured(harness, recording, coarse, *options):
    ran = harness("diff", recording, coarse, *options, "--format", "json")
    assert ran.status == 0, ran.err
    assert (ran.json["kind"], ran.json["is_verdict"], "verdict" in ran.json) == ("measurement", False, False)
    return ran.json, {tap["tap"]: tap for tap in ran.json["taps"]}


def test_two_precisions_are_measured_in_roundings_of_the_coarser_one(harness, recording, coarse):
    document, taps = measured(harness, recording, coarse)
    assert (document["dtypes"], document["unit"]) == (["float32", "bfloat16"], "bfloat16")
    assert taps["model.embed_tokens"]["roundings_median"] == pytest.approx(1, rel=0.2)  # what one rounding is
    ends = [tap for tap in document["taps"] if tap["ends_layer"]]
    assert [tap["layer"] for tap in ends] == [None, 0, 1, 2, None, None]
    for one, two in pairwise(ends):
        assert two["growth"] == pytest.approx(two["roundings_median"] / one["roundings_median"])
    assert document["logits"]["num_rows"] == 6
    text = harness("diff", recording, coarse).out
    assert text.startswith("MEASURED  ")
    assert "This is not a verdict" in text
    assert "PASS" not in text


@pytest.mark.parametrize(
    ("change", "is_finite"),
    [(lambda tensor: tensor.mul_(1.5), True), (lambda tensor: tensor[0].fill_(torch.nan), False)],
)
def test_the_first_tap_above_the_level_is_named(harness, recording, coarse, change, is_finite):
    assert measured(harness, recording, coarse, "--close", 1000)[0]["first_above"] is None
    rewrite(coarse, lambda tensors: change(tensors[LATER_TAP]))
    document, taps = measured(harness, recording, coarse, "--close", 100)
    assert document["first_above"]["tap"] == LATER_TAP
    assert (taps[LATER_TAP]["num_not_finite"] == 0) is is_finite
    assert ("H042" not in harness("diff", recording, coarse).out) is is_finite
    assert measured(harness, recording, coarse, "--taps", "lm_head")[1].keys() == {"lm_head"}


def with_tokens(folder, target, at, *, request=0):
    """Copy a recording with another token of a request."""
    shutil.copytree(folder, target)
    manifest = json.loads((target / "manifest.json").read_text())
    tokens = manifest["requests"][request]["token_ids"]
    tokens[at] += 1
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def test_rows_behind_the_first_other_token_are_left_out(harness, recording, coarse, tmp_path):
    _, whole = measured(harness, recording, coarse)
    document, diverged = measured(harness, recording, with_tokens(coarse, tmp_path / "later", -1))
    assert diverged["model.norm"]["num_rows"] < whole["model.norm"]["num_rows"]
    assert any("the tokens differ from position" in note for note in document["notes"])
    for folder in (coarse, tmp_path / "later"):  # of another request than the one that parts behind its prompt
        ran = harness("diff", recording, with_tokens(folder, tmp_path / f"{folder.name}-prompt", 0, request=1))
        assert (ran.status, ran.err.partition(":")[0]) == (2, "H027")


def test_a_golden_of_another_dtype_and_a_model_judge_and_do_not_measure(harness, golden, recording, coarse, llama):
    for arguments in ((golden, coarse), (recording, coarse, "--model", llama)):
        ran = harness("diff", *arguments)
        assert (ran.status, ran.err.partition(":")[0]) == (2, "H158")
    ran = harness("diff", recording, coarse, "--require", "decode")
    assert (ran.status, ran.err.partition(":")[0]) == (2, "H013")
