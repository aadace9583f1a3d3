"""A pass lists the experts that no row chose: those that hooks on the routers do not see either."""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import harness

PROMPT = [5, 17, 99, 23, 64, 8]
NUM_EXPERTS = 12


def test_experts_that_no_row_chose_are_listed(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, num_experts=NUM_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    report = harness.check(model, model=tmp_path, prompts=[PROMPT], max_new_tokens=2, schedules=["plain"])
    assert report.is_ok

    chosen = {layer: set[int]() for layer in range(2)}
    for layer, router in enumerate(layer.mlp.gate for layer in model.model.layers):
        router.register_forward_hook(lambda _gate, _args, out, at=layer: chosen[at].update(out[-1].flatten().tolist()))
    with torch.no_grad():
        first = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
        model(torch.tensor([[*PROMPT, first]]))
    expected = {(layer, expert) for layer in chosen for expert in range(NUM_EXPERTS) if expert not in chosen[layer]}
    names = report.runs[0].coverage.experts_not_chosen
    assert len(expected) > 2
    assert {(int(name.split(".")[2]), int(name.rpartition("[")[2][:-1])) for name in names} == expected
    assert f"{len(expected)} experts that no row chose" in report.text()
