"""What a RolloutMonitor costs beside a training step: a random Llama, rollouts by the reference engine, a plain loop.

python reports/cpu/rollout_cost.py [--steps 6] [--rows 32] [--tokens 64] [--monitored 4] [--hidden 512] [--layers 8]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harness
from reference_engine import EngineConfig, LLMEngine, SamplingParams

KINDS = {"monitor, trainer at hand": True, "monitor, between": False, "monitor, log alone": False}


def sample(folder, prompts, num_tokens, seed):
    """Return rows that the engine samples with the weights of the folder."""
    params = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=seed, num_logprobs=0, ignore_eos=True)
    with LLMEngine(folder, EngineConfig(dtype="bfloat16", num_blocks=1024)) as engine:
        outputs = engine.generate(prompts, params)
    return [
        {
            "prompt_ids": prompt,
            "response_ids": list(output.token_ids),
            "engine_logprobs": [token.logprob for token in output.logprobs],
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def gradients(module, rows):
    """Compute those of REINFORCE with random advantages, rows of equal lengths in one batch; return log probabilities."""
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]] for row in rows])
    num_prompt = len(rows[0]["prompt_ids"])
    logprobs = module(input_ids=ids).logits[:, :-1].float().log_softmax(dim=-1)
    chosen = logprobs.gather(2, ids[:, 1:, None])[:, num_prompt - 1 :, 0]
    loss = -(torch.randn(len(rows), 1) * chosen).mean()
    module.zero_grad()
    loss.backward()
    return chosen.detach()


def main():
    """Print a line for each step: seconds of a CPU that rollout, training step and monitor take."""
    parser = argparse.ArgumentParser()
    for name, value in (("steps", 6), ("rows", 32), ("tokens", 64), ("monitored", 4), ("hidden", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden, num_hidden_layers=arguments.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    module = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    monitor = harness.RolloutMonitor(every=2, num_rows=arguments.monitored, dtype="bfloat16", raises=False)
    print(json.dumps({"parameters": module.num_parameters(), **vars(arguments)}))
    with tempfile.TemporaryDirectory() as folder:
        for step in range(arguments.steps):
            module.save_pretrained(folder)
            prompts = torch.randint(3, config.vocab_size, (arguments.rows, 32)).tolist()
            seconds, begin = {}, time.process_time()
            rows = sample(Path(folder), prompts, arguments.tokens, step)
            seconds["rollout"] = time.process_time() - begin
            begin = time.process_time()
            columns = gradients(module, rows)
            seconds["training"] = time.process_time() - begin
            logged = [row | {"trainer_logprobs": column.tolist()} for row, column in zip(rows, columns, strict=True)]
            for at, (name, trainer) in enumerate(KINDS.items()):
                begin = time.process_time()
                report = monitor.step(100 * step + at, logged, model=module, trainer=module if trainer else None) or report
                seconds[name] = time.process_time() - begin
            begin = time.process_time()
            optimizer.step()
            seconds["training"] += time.process_time() - begin
            line = {name: round(value, 4) for name, value in seconds.items()}
            print(json.dumps({"step": step, **line, "verdict": report.outcome}), flush=True)


if __name__ == "__main__":
    main()
