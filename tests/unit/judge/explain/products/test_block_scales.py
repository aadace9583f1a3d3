"""Quantised weights whose blocks have other scales; what the engine declares of its weights says which blocks."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.explain.products.rows import scales_of_blocks

from ..toys import ToyModel, failure_of, linear, random

TAP, SOURCE = "model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"
ROW = 3


def explained(bench, weights, change):
    """Explain k_proj whose row 3 is changed: `change` gets its blocks of 16 weights, and gives other ones."""
    weight = bench.weight(TAP).clone()
    weight[ROW] = change(weight[ROW].unflatten(0, (-1, 16))).flatten()
    recording = bench.planted({TAP: bench.tap(SOURCE) @ weight.T})
    manifest = recording.manifest.model_copy(update={"numerics": Numerics(weights=weights)})
    return bench.explained(Recording(recording.path, manifest, recording.steps), TAP)


@pytest.mark.parametrize(("weights", "num_fitted"), [(("Q6_K",), 7), (("Q8_0", "Q6_K"), 7)])
def test_blocks_have_the_size_of_the_declared_format(bench, weights, num_fitted):
    explanation = explained(bench, weights, lambda blocks: blocks * torch.tensor([1, 2, 1, 0.5, 1, 1])[:, None])
    assert explanation.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert explanation.detail == "factors 1, 2, 1, 0.5, 1, 1"
    assert explanation.num_fitted == num_fitted


def test_blocks_with_the_scale_of_the_next(bench):
    def shifted(blocks):
        largest = blocks.abs().amax(dim=1, keepdim=True)
        return blocks * torch.cat((largest[1:], largest[-1:])) / largest

    assert explained(bench, ("Q6_K",), shifted).detail == "5 of 6 blocks have the scale of the next"


def test_a_minimum_of_each_block_is_fitted_where_the_format_has_one(bench):
    def changed(blocks):
        larger = blocks.unflatten(0, (-1, 2))
        larger[1] = 1.5 * larger[1] + 0.5 * larger.min()  # scale times integer minus minimum, under another scale
        return larger.flatten(0, 1)

    explanation = explained(bench, ("Q4_K",), changed)
    assert explanation.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert explanation.detail == "factors 1, 1.5, 1"
    assert explained(bench, ("Q8_0",), changed).cause != explanation.cause


def test_an_engine_that_declares_nothing_has_no_blocks(bench):
    explanation = explained(bench, (), lambda blocks: blocks * torch.tensor([1, 2, 1, 0.5, 1, 1])[:, None])
    assert "scales" not in explanation.cause


@pytest.mark.parametrize(("rows", "width", "weights"), [
    (12, 128, ()), (12, 120, ("int8",)), (4, 128, ("int8",)), (12, 128, ("int8",)),
])  # fmt: skip
def test_scales_are_fitted_only_where_blocks_and_rows_are_there(rows, width, weights):
    x, weight = random(rows, width), random(5, width, seed=1)
    operation = Operation(tap=TAP, kind=Kind.LINEAR, source=TAP)
    recording = SimpleNamespace(manifest=SimpleNamespace(numerics=Numerics(weights=weights)))
    wrong = failure_of(
        operation, 2 * x @ weight.T, x @ weight.T, x,
        model=ToyModel(operation, modules={TAP: linear(weight)}), recording=recording,
    )  # fmt: skip
    assert bool(list(scales_of_blocks(wrong))) == ((rows, width, weights) == (12, 128, ("int8",)))
