"""How large rounding is at each token, and what that lets be told apart."""

import pytest
import torch

from harness.extensions.rollout.format import read_rollouts
from harness.extensions.rollout.forward import Forwards
from harness.extensions.rollout.lanes import Places
from harness.extensions.rollout.setting import Setting
from harness.oracle.model import load_model

from .planted import other_checkpoint
from .training import prompts, restarting, rollout, train_column

SMALL = "gemma3-tiny"


@pytest.fixture(scope="module")
def small():
    """A model, and 64 tokens of which one has most of the rounding."""
    hf = load_model(f"cases/checkpoints/{SMALL}", dtype=torch.bfloat16, stays=True)
    return hf, rollout(SMALL, prompts(8, seed=0), seed=0, num_tokens=8)


def test_rounding_is_known_token_by_token(small):
    hf, rows = small
    columns = train_column(hf.model, rows, packs=restarting)
    log = read_rollouts([{**row, "trainer_logprobs": column} for row, column in zip(rows, columns, strict=True)])
    forwards = Forwards(hf, Places(log.rows))
    error = forwards.places.column("trainer") - forwards.truth(Setting())
    units = (error / forwards.noise(Setting())).abs()
    assert 0.4 < float(units.square().mean().sqrt()) < 1.6
    assert float(units.max()) < 6
    one_difference = (forwards.control(Setting()) - forwards.truth(Setting())).abs()
    assert float((error / one_difference).abs().max()) > 8  # which is 0 by chance


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_stale_layer_shows_beside_a_token_with_most_of_the_rounding(small, compare, tmp_path, temperature):
    rows = small[1]
    old = other_checkpoint(SMALL, tmp_path / "old", "layers.0.", size=0.1)
    stale = load_model(old, dtype=torch.bfloat16, stays=True).model
    result = compare(rows, train_column(stale, rows, temperature=temperature), model=SMALL, previous=old)
    weights, *meaning = [term for term in result.terms if not term.is_rounding]
    assert weights.kind == "weights"
    # The temperature is found first, and fits the stale layer, too: it is fitted again with the layer.
    fitted = [] if temperature == 1 else ["trainer: log probabilities are temperature 0.6, no truncation"]
    assert [term.detail for term in meaning] == fitted
