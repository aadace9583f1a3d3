"""What HF's own code raises ends in an error that names HF; what the harness or somebody's hook raises does not."""

from pathlib import Path

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel
from harness.oracle.paired import run_pair
from harness.oracle.untraced import hf_failures
from harness.oracle.watch import Seeing, watching

from ..tiny_models import tiny_model
from .test_paired import Notes


@pytest.fixture
def hf():
    return HFModel(
        model=tiny_model("llama"), checkpoint=Checkpoint(Path("tiny")), dtype=torch.float32, device=torch.device("cpu")
    )


def test_what_hf_raises_names_hf(hf):
    hf.config._attn_implementation = "eager"
    hf.module("model.layers.0.self_attn").num_key_value_groups = "two"
    with pytest.raises(HarnessError) as caught:
        hf.run(input_ids=torch.tensor([[3, 4]]))
    assert caught.value.code is Code.HF_FAILED
    assert "TypeError" in str(caught.value)
    assert "tiny" in str(caught.value)


def test_it_is_hfs_in_the_truth_and_through_what_watches(hf):
    assert hf.graph
    with pytest.raises(HarnessError) as caught:
        run_pair(hf, torch.tensor([[3, 99]]), Notes(), truth_dtype=torch.float64)
    assert caught.value.code is Code.HF_FAILED


def test_what_the_harness_raises_stays_what_it_is(hf):
    def sink(_source, _value):
        raise ZeroDivisionError

    with watching(hf) as watch, watch.showing(Seeing(sink)), pytest.raises(ZeroDivisionError):
        hf.run(input_ids=torch.tensor([[3, 4]]))


def test_what_a_hook_of_somebody_raises_stays_what_it_is(hf):
    def hook(*_arguments):
        raise ZeroDivisionError

    hf.module("model.layers.1.mlp").register_forward_hook(hook)
    with pytest.raises(ZeroDivisionError):
        hf.run(input_ids=torch.tensor([[3, 4]]))


def test_it_is_hfs_in_an_environment_below_a_folder_called_torch():
    code = compile("1 / 0", "/home/a/torch/.venv/site-packages/transformers/models/a.py", "exec")
    with pytest.raises(HarnessError, match="HF's own forward raised ZeroDivisionError"), hf_failures(Path("tiny")):
        exec(code)
