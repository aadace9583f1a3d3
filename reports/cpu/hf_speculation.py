"""transformers' own speculation against its greedy decoding: a draft model, and MTP layers. Without the harness.

    PYTHONPATH=. python reports/cpu/hf_speculation.py        # torch, transformers

The draft model is the model with noise in its weights, which is often wrong. Seen: reports/cpu/speculation.md.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.extensions.faults.zoo import models as zoo
from harness.extensions.faults.zoo.quiet import quiet
from tests import mtp

LENGTHS, NUM_NEW = (8, 16, 26, 36, 48), 40
CHECKPOINTS = Path("cases/checkpoints")


def compare(name: str, model: PreTrainedModel, options: Callable[[], dict[str, Any]]) -> None:
    """Print of how many prompts the tokens are those of greedy decoding, and where the first differs."""
    same, where = 0, []
    for length in LENGTHS:
        plain = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = zoo.tokens(seed=length, count=length)
        greedy, speculative = model.generate(ids, **plain)[0, length:], model.generate(ids, **plain, **options())[0, length:]
        unequal = (greedy[: len(speculative)] != speculative[: len(greedy)]).nonzero()
        same += not len(unequal)
        where += [f"{length}: token {int(unequal[0])}"] if len(unequal) else []
    print(f"{name:20} {same} of {len(LENGTHS)} prompts equal {'; '.join(where)}")


def main() -> None:
    """Compare the embedded checkpoints with drafts, and three families with layers of their own."""
    with quiet():
        for folder in sorted(CHECKPOINTS.iterdir()):
            if (folder / "config.json").exists():
                model, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
                for parameter in draft.parameters():
                    parameter.data += (
                        0.05 * parameter.std() * torch.randn(parameter.shape) if parameter.dim() > 1 else 0
                    )
                try:
                    compare(folder.name, model.eval(), lambda draft=draft: {"assistant_model": draft.eval()})
                except Exception as error:
                    print(f"{folder.name:20} {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        for name, num_layers in (("mellum", None), ("glm4_moe", 46), ("deepseek_v3", 61)):
            with tempfile.TemporaryDirectory() as made:
                mtp.save(name, Path(made), num_layers=num_layers)
                model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
                compare(f"{name}, MTP", model, lambda: {"use_mtp": True})


if __name__ == "__main__":
    main()
