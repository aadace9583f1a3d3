"""A trainer that ranks share, on each of them: its weights by name, and its gap to what an engine sampled."""

import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM

import harness
from harness.formats.checkpoint import resolve
from reference_engine import EngineConfig, LLMEngine, SamplingParams

MODEL = "llama-tiny"
PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 99, 98, 97]]


def load(kind):
    plan = {"tp_plan": "auto"} if kind == "tensor_parallel" else {}
    module = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.bfloat16, **plan)
    if kind == "flat_shards":
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    if kind == "fully_shard":
        mesh = init_device_mesh("cpu", (2,))
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module


def sampled():
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=0, num_logprobs=0, ignore_eos=True)
    with LLMEngine(resolve(MODEL), EngineConfig(dtype="bfloat16", num_blocks=32)) as engine:
        outputs = engine.generate(PROMPTS, params)
    return [
        {
            "prompt_ids": prompt,
            "response_ids": list(output.token_ids),
            "engine_logprobs": [logprob.logprob for logprob in output.logprobs],
        }
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]


def main():
    kind = sys.argv[1]
    distributed.init_process_group("gloo")
    rows, module = sampled(), load(kind)
    is_flat = kind == "flat_shards"
    if not is_flat:
        assert harness.weights(resolve(MODEL), module).outcome == "pass"
    report = harness.rollout(rows, model=MODEL if is_flat else module, trainer=module, dtype="bfloat16")
    report.assert_ok()
    note = "operations and weights of the trainer: its tensors are not those of the model"
    assert is_flat == any(item.startswith(note) for item in report.not_judged), report.text()
    if kind == "fully_shard":
        assert all(hasattr(parameter, "full_tensor") for parameter in module.parameters()), "weights are shards again"
    sys.stdout.write("sound\n")
    distributed.destroy_process_group()


main()
