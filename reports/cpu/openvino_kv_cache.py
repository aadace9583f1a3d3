"""OpenVINO 2026.4.1 keeps keys and values in float16 where float32 is asked for: shown without the harness.

    optimum-cli export openvino --model cases/checkpoints/qwen2-tiny --task text-generation-with-past \\
        --weight-format fp32 /tmp/export
    python reports/cpu/openvino_kv_cache.py /tmp/export cases/checkpoints/qwen2-tiny

needs openvino, torch and transformers. `INFERENCE_PRECISION_HINT=f32` alone leaves `KV_CACHE_PRECISION` at float16, so
that every token after the prompt is computed from rounded keys.
"""

import sys

import numpy as np
import openvino
import torch
from transformers import AutoModelForCausalLM

IDS = [5, 9, 14, 3, 8, 21, 4, 17, 6] * 5
PROMPT = 8


def logits(model: openvino.CompiledModel) -> np.ndarray:
    """Return the logits of each token from the prompt's last on, one token a step."""
    request, rows = model.create_infer_request(), []
    for first, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, len(IDS)))]:
        request.infer(
            {
                "input_ids": np.array([IDS[first:end]]),
                "attention_mask": np.ones((1, end), dtype=np.int64),
                "position_ids": np.arange(first, end)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        rows.append(np.array(request.get_output_tensor(0).data)[0, -1])
    return np.stack(rows)


def main(export: str, checkpoint: str) -> None:
    """Print how far the logits are from HF's, at the prompt's last token and at most after it."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        truth = model(torch.tensor([IDS])).logits[0, PROMPT - 1 :].numpy()
    core = openvino.Core()
    for settings in ({}, {"KV_CACHE_PRECISION": "f32"}):
        graph = core.read_model(f"{export}/openvino_model.xml")
        compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **settings})
        off = np.abs(logits(compiled) - truth).max(axis=1)
        kept = compiled.get_property("KV_CACHE_PRECISION").get_type_name()
        print(f"cache in {kept}: {off[0]:.1e} at the prompt, {off[1:].max():.1e} after it")


if __name__ == "__main__":
    main(*sys.argv[1:])
