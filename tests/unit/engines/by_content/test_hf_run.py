"""HF's forward over an engine's values: HF may write into what its modules return."""

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from harness.engines.by_content.hf_run import run_hf
from harness.oracle.model import load_model

QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def hf(tmp_path):
    """OLMo, which cuts off queries, keys and values in place."""
    torch.manual_seed(0)
    config = OlmoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, clip_qkv=1e-3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    OlmoForCausalLM(config).save_pretrained(tmp_path)
    return load_model(tmp_path, dtype=torch.float32)


def test_what_hf_writes_reaches_neither_a_value_nor_what_takes_its_place(hf):
    weight = hf.model.get_submodule(QUERIES).weight
    values, inputs = {}, hf.model.get_submodule("model.layers.0.input_layernorm")
    rows = torch.ones(3, 32)

    def look(operation, value):
        values[operation.tap] = value
        return rows if operation.tap == QUERIES else None

    run_hf(hf, torch.tensor([[5, 9, 3]]), look)
    assert torch.equal(rows, torch.ones(3, 32))
    embedded = hf.model.get_input_embeddings().weight[[5, 9, 3]]
    torch.testing.assert_close(values[QUERIES], (inputs(embedded) @ weight.T).detach())
    assert float(values[QUERIES].abs().max()) > 1e-3
    assert float(values["model.layers.0.q_rope"].abs().max()) < 2e-3, "HF went on with what it has cut off"
