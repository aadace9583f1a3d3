"""An engine's layer that predicts the token after the next is checked without a table, sound and with faults."""

import pytest
import torch

import harness
from harness.errors import Code, HarnessError
from tests import mtp

PROMPTS = [[11, 12, 13, 14, 15, 16, 17, 18], [*range(21, 32), 40], [77, 33, 66]]
LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mellum")
    mtp.save("mellum", folder)
    return folder


def check(folder, *faults, dtype=torch.float32):
    engine = mtp.MtpEngine(folder, dtype=dtype, faults=faults)
    schedules = ["plain"] if faults else ["plain", "chunked:3"]
    return harness.check(
        engine, model=folder, prompts=PROMPTS, max_new_tokens=8, schedules=schedules, dtype=dtype, mtp=True
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("faults", [(), ("own positions",)], ids=["", "own positions"])
def test_a_sound_engine_passes(folder, dtype, faults):
    """Attention sees differences of positions alone: those of the tokens ahead will do, and the rows' own."""
    result = check(folder, *faults, dtype=dtype)
    assert result.is_ok
    for run in result.runs:
        judged = {tap.name: tap for tap in run.taps}
        assert judged[f"{LAYER}post_norm"].num_rows > 30
        assert judged[f"{LAYER}eh_proj"].num_rows == judged[f"{LAYER}post_norm"].num_rows
        turned = [judged[f"{LAYER}{name}_rope"] for name in ("q", "k")]
        assert all("own position" in (tap.convention or "") for tap in turned) == bool(faults)


FAULTS = {
    "own token": ("enorm", "it reads model.embed_tokens instead of embed_tokens"),
    "hidden state before the norm": ("hnorm", "it reads model.layers.1.output instead of model.norm"),
    "other order": ("eh_proj.input", "the parts are joined as [hnorm, enorm] instead of [enorm, hnorm]"),
    "no norm of the token": ("eh_proj.input", ""),
    "no norm of the hidden state": ("hnorm", "norm"),
    "no token at position 0": ("enorm", ""),
    "keys one position early": ("k_rope", "rotary at a position off by one (-1)"),
    "no window": ("attention", "the sliding window is ignored"),
    "no cache": ("attention", ""),
    "weights do not add up to 1": ("mtp_block.mlp.", "norm_topk_prob"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_operation(folder, fault, dtype):
    where, cause = FAULTS[fault]
    result = check(folder, fault, dtype=dtype)
    assert not result.is_ok
    first = result.first_divergence
    assert first.tap.startswith(LAYER + where)
    assert cause in first.explanation.cause


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["no last norm", "not run"])
def test_an_engine_of_which_the_end_is_not_found_is_refused(folder, fault):
    """Nothing follows from the last norm, by which another value could be told."""
    with pytest.raises(HarnessError, match="does not show what further tokens are predicted from") as caught:
        check(folder, fault)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert caught.value.expected == f"{LAYER}post_norm"
