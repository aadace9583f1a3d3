"""The cost of a KV cache in few bits: against transformers' own cache, token by token, with rounded entries."""

import pytest
import torch
from transformers import DynamicCache

from harness.errors import Code, HarnessError
from harness.extensions.quant.caches import check_cache, run_cache
from harness.extensions.quant.forward import hf_distributions
from harness.oracle.caches import cache_argument
from harness.oracle.model import load_model

IDS = [1, 5, 9, 33, 77, 12, 4, 8]


class Rounded(DynamicCache):
    """Keeps what a change makes of keys and values."""

    def __init__(self, change, config):
        super().__init__(config=config)
        self.change = change

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(self.change(key_states), self.change(value_states), *args, **kwargs)


def float8(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def int8_by_head(x):
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.fixture(scope="module")
def hf(checkpoints):
    return load_model(checkpoints / "qwen3-tiny", dtype=torch.float32, stays=True)


@torch.no_grad()
def token_by_token(hf, change):
    cache, rows = Rounded(change, hf.model.config), []
    for at, token in enumerate(IDS):
        inputs = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[at]])}
        inputs[cache_argument(hf.model.forward)] = cache
        rows.append(hf.model(**inputs, use_cache=True).logits[0, -1])
    return torch.stack(rows).double().log_softmax(dim=-1)


@pytest.mark.parametrize(("name", "change"), [("float8_e4m3fn", float8), ("int8:head", int8_by_head)])
def test_it_is_what_a_model_says_that_decodes_with_such_a_cache(hf, name, change):
    run = run_cache(name, hf, [IDS])
    expected = token_by_token(hf, change)
    exact = hf_distributions(hf, [IDS])[0].double()
    cost = (exact - expected).abs().max()
    assert (run.dequantised[0].double() - expected).abs().max() < 0.02 * cost
    assert torch.equal(hf_distributions(hf, [IDS])[0].double(), exact), "the model is as it was"


def test_sizes_are_those_of_keys_and_values(hf):
    config, numbers = hf.model.config, 2 * len(IDS)
    numbers *= config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for name, bits in (("bfloat16", 16), ("Q8_0", 8.5), ("nvfp4", 4.5), ("int4:head", 4 + 32 / config.head_dim)):
        run = run_cache(name, hf, [IDS])
        assert (run.bits_per_weight, run.size_bytes) == (bits, numbers * bits // 8)


@pytest.mark.parametrize("name", ["int8", "float8", "Q3_K", "mxfp4:head", "int8:tensor", ""])
def test_what_is_no_cache_is_refused(name):
    with pytest.raises(HarnessError) as caught:
        check_cache(name)
    assert caught.value.code is Code.BAD_OPTION
    assert "int8:head" in str(caught.value)
