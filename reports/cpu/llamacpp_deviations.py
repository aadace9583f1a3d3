"""Where llama.cpp, or its converter, computes another model than transformers. Without the harness.

    PYTHONPATH=. python reports/cpu/llamacpp_deviations.py LLAMA_CPP_CHECKOUT     # of llama-cpp-python 0.3.36: vendor/llama.cpp

Each model is tiny and random. For each the distance of the last token's logits from HF's in float32, over their norm: as the
checkpoint is, and with the one setting that makes both agree. Seen: reports/cpu/llamacpp.md.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from harness.extensions.faults.zoo.lively import make_lively
from harness.extensions.faults.zoo.quiet import quiet
from harness.extensions.faults.zoo.tiny_config import tiny_config
from tests.llamacpp_files import convert, last_logits

IDS = list(range(5, 125, 3))
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("glm", {}, {"rms_norm_eps": 1.5625e-7}, {"rms_norm_eps": 1e-5}),
    ("falcon_mamba", {}, {"mixer_rms_eps": 1e-6}, {"mixer_rms_eps": 1e-5}),
    ("gpt_oss", {"swiglu_limit": 7.0}, {"truncate": False}, {"truncate": True}),
    ("qwen3_moe", {}, {"norm_topk_prob": False}, {"norm_topk_prob": True}),
    ("deepseek_v3", {}, {}, {"scoring_func": "sigmoid"}),
]
"""Family, settings of both, those of the first, those with which both agree."""


def save(family: str, settings: dict[str, Any], folder: Path) -> torch.Tensor:
    """Write a checkpoint, and return HF's logits after the last token."""
    config = tiny_config(family)
    for name, value in settings.items():
        if name == "truncate":
            config.rope_parameters = {**config.rope_parameters, name: value}
        else:
            setattr(config, name, value)
    with quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        make_lively(model, 0)
        model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {k: v for k, v in settings.items() if k == "scoring_func"}))
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0, -1].double()


def main() -> None:
    """Print both distances of each case."""
    checkout = Path(sys.argv[1])
    for family, both, as_it_is, agreeing in CASES:
        for settings in (as_it_is, agreeing):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / family
                hf = save(family, both | settings, folder)
                convert(checkout, folder, Path(scratch) / "model.gguf").check_returncode()
                actual = last_logits(Path(scratch) / "model.gguf", IDS)
            said = ", ".join(f"{name}={value}" for name, value in settings.items()) or "as transformers writes it"
            print(f"{family:14} {said:32} {float((actual - hf).norm() / hf.norm()):.1e}", flush=True)


if __name__ == "__main__":
    main()
