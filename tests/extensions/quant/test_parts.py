"""The cost of each part of a model: exact, of that part alone, and the original is left as it was."""

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.extensions.quant.forward import distance, hf_distributions
from harness.extensions.quant.parts import SPLITS, check_splits, part_costs
from harness.oracle.model import load_model

TEXT = [[1, 5, 9, 33, 77, 12, 4, 8], [2, 60, 9, 3, 100, 31, 7, 7]]
O_PROJ = "model.layers.1.self_attn.o_proj"


def models(folder, *changed):
    """Return a model, and the same with some weights rounded to eighths."""
    exact, quantised = (load_model(folder, dtype=torch.float32) for _ in range(2))
    for name, values in quantised.model.named_parameters():
        if any(name.startswith(item) for item in changed):
            values.copy_((values * 8).round() / 8)
    return exact, quantised


def measured(exact, quantised, *splits):
    truth = hf_distributions(exact, TEXT)
    return truth, part_costs(exact, quantised, TEXT, truth, splits, lambda name: None)


def test_one_changed_weight_is_the_cost_of_its_layer_and_of_its_kind(checkpoints):
    exact, quantised = models(checkpoints / "llama-tiny", O_PROJ)
    truth, costs = measured(exact, quantised, *SPLITS)
    assert [(cost.split, cost.name, cost.layer) for cost in costs] == [
        ("layers", "model.layers.1", 1), ("kinds", "self_attn.o_proj", None), ("weights", O_PROJ, 1)
    ]  # fmt: skip
    whole = distance(truth, hf_distributions(quantised, TEXT)).mean
    assert whole > 0
    assert {cost.kl_mean for cost in costs} == {whole}
    weight, changed = exact.module(O_PROJ).weight, quantised.module(O_PROJ).weight
    assert costs[0].num_weights == weight.numel()
    assert costs[0].relative_error == pytest.approx(float((changed - weight).norm() / weight.norm()), rel=1e-5)


def test_parts_hold_every_changed_weight_once_and_the_original_stays(checkpoints):
    exact, quantised = models(checkpoints / "llama-tiny", "model.layers", "lm_head")
    truth, costs = measured(exact, quantised, *SPLITS)
    sizes = {split: sum(cost.num_weights for cost in costs if cost.split == split) for split in SPLITS}
    assert len(set(sizes.values())) == 1
    assert [cost.name for cost in costs if cost.split == "layers"][:2] == ["model.layers.0", "model.layers.1"]
    assert all(map(torch.equal, truth, hf_distributions(exact, TEXT)))


def test_tied_weights_are_one_part(checkpoints):
    exact, quantised = models(checkpoints / "gemma3-tiny", "model.embed_tokens")
    assert exact.model.get_output_embeddings().weight is exact.model.get_input_embeddings().weight
    truth, (cost,) = measured(exact, quantised, "weights")
    assert cost.kl_mean == distance(truth, hf_distributions(quantised, TEXT)).mean
    assert exact.model.get_output_embeddings().weight is exact.model.get_input_embeddings().weight


def test_the_original_stays_where_a_forward_fails(checkpoints):
    exact, quantised = models(checkpoints / "llama-tiny", O_PROJ)
    before = exact.module(O_PROJ).weight
    with pytest.raises(ValueError, match="argument"):
        part_costs(exact, quantised, TEXT, [], ["weights"], lambda name: None)
    assert exact.module(O_PROJ).weight is before


def test_a_name_that_is_no_split_is_refused():
    assert check_splits(" layers,kinds") == ["layers", "kinds"]
    with pytest.raises(HarnessError, match="not split into 'heads'") as caught:
        check_splits("heads")
    assert caught.value.code is Code.BAD_OPTION


def test_without_parts_no_weights_are_read(checkpoints):
    """Those of a large model are on no device between two forwards."""
    exact, quantised = models(checkpoints / "llama-tiny", O_PROJ)
    truth = hf_distributions(exact, TEXT)
    for hf in (exact, quantised):
        hf.model.to("meta")
    assert part_costs(exact, quantised, TEXT, truth, (), lambda name: None) == ()
