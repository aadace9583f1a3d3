"""CTranslate2's Qwen 3, which shows its logits alone, sound and with five mistakes: `pip install ctranslate2==4.8.5`.

From the repository's root: `python reports/cpu/ctranslate2_logits.py`.
"""

import json
import shutil
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from safetensors.torch import load_file, save_file

import harness

CHECKPOINT = Path("cases/checkpoints/qwen3-tiny")
PROMPTS = [[5, 9, 14, 3, 8], list(range(20, 60)), [*[7] * 9, 3, 5]]


class Engine:
    recomputes = True

    def __init__(self, folder, compute_type):
        self.generator, self.tokens = ctranslate2.Generator(str(folder), compute_type=compute_type, intra_threads=1), {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            self.tokens[request] = self.tokens.get(request, [])[:first] + list(ids)
            logits = self.generator.forward_batch([self.tokens[request]])
            rows.append(torch.from_numpy(np.array(logits))[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        self.tokens.pop(request, None)


# mistakes
def other_theta(config, _):
    config["rope_parameters"]["rope_theta"] = 5000.0


def other_eps(config, _):
    config["rms_norm_eps"] = 1e-5


def exchanged(_, weights):
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up].clone(), weights[gate].clone()


def scaled(_, weights):
    weights["model.norm.weight"] *= 1.02


def converted(folder, change):
    """Return a converted copy of the checkpoint, with a mistake in its config or its weights."""
    copy = folder / "model"
    shutil.copytree(CHECKPOINT, copy)
    config, weights = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    if change is not None:
        change(config, weights)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    TransformersConverter(str(copy)).convert(str(folder / "converted"))
    return folder / "converted"


def main():
    for name, change, compute_type in (
        ("sound", None, "float32"), ("theta", other_theta, "float32"), ("eps", other_eps, "float32"),
        ("gate and up of one layer", exchanged, "float32"), ("final norm", scaled, "float32"), ("int8", None, "int8"),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as made:
            engine = Engine(converted(Path(made), change), compute_type)
            report = harness.check(engine, model=CHECKPOINT, prompts=PROMPTS, max_new_tokens=8, dtype="float32")
        first = report.first_divergence
        said = "" if first is None or first.explanation is None else first.explanation.cause
        print(f"{name}: {report.outcome.value}, {', '.join(run.schedule for run in report.runs)}; {said}")


if __name__ == "__main__":
    main()
