"""mlx-lm 0.32.2 does not read `rope_parameters` of transformers 5: shown without the harness.

    python reports/cpu/mlx_rope.py cases/checkpoints/llama-tiny

needs mlx-lm, torch and transformers. The same weights give other logits until theta and scaling are written as
transformers 4 did.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM

mx.set_default_device(mx.cpu)
IDS = list(range(3, 131))


def distance(folder: Path, truth: np.ndarray) -> float:
    """Return the largest difference of MLX's logits from HF's."""
    model, _config = load_model(folder)
    return float(np.abs(np.array(model(mx.array([IDS])).astype(mx.float32))[0] - truth).max())


def main(folder: Path) -> None:
    """Print the distance as the checkpoint is, and with the older keys beside the new one."""
    with torch.no_grad():
        truth = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0].float().numpy()
    print("rope_parameters alone:               ", distance(folder, truth))
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        rope = dict(config["rope_parameters"])
        config |= {"rope_theta": rope.pop("rope_theta")}
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope
        (Path(copy) / "config.json").write_text(json.dumps(config))
        print("rope_theta and rope_scaling beside it:", distance(Path(copy), truth))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
