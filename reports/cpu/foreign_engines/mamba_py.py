"""mamba.py's own step: `pip install mambapy einops`. Its Mamba 2, which needs CUDA, is left out."""

import json
import sys
from types import SimpleNamespace
import torch
from safetensors.torch import load_file

sys.modules["mambapy.mamba2"] = SimpleNamespace(
    Mamba2=object, Mamba2Config=type("M", (), {})
)  # it needs mamba_ssm, on CUDA alone
from mambapy.lm import LM
from mambapy.mamba import MambaConfig


def load(folder, dtype):
    c = json.loads((folder / "config.json").read_text())
    config = MambaConfig(
        d_model=c["hidden_size"],
        n_layers=c["num_hidden_layers"],
        d_state=c["state_size"],
        expand_factor=c["expand"],
        d_conv=c["conv_kernel"],
        dt_rank=c["time_step_rank"],
        rms_norm_eps=c["layer_norm_epsilon"],
    )
    model = LM(config, c["vocab_size"])
    state = load_file(folder / "model.safetensors")
    new = {}
    for key, value in state.items():
        key = (
            key.replace("backbone.embeddings", "embedding")
            .replace("backbone.norm_f", "norm_f")
            .replace("backbone", "mamba")
        )
        new[key] = value
    new.setdefault("lm_head.weight", new["embedding.weight"])
    model.load_state_dict(new)
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            c = self.model.config
            caches = self.caches.setdefault(
                request,
                [
                    (None, torch.zeros(1, c.d_inner, c.d_conv - 1, dtype=self.model.lm_head.weight.dtype))
                    for _ in range(c.n_layers)
                ],
            )
            for token in ids:
                logits, caches = self.model.step(torch.tensor([token]), caches)
            self.caches[request] = caches
            rows.append(logits[0])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]

    def states(self, request):
        return {i: [inputs, h] for i, (h, inputs) in enumerate(self.caches[request])}


def open_engine(folder, dtype):
    """In bfloat16 mamba.py runs under autocast alone: it multiplies the state in float32 by the weights."""
    engine = Engine(load(folder, "float32"))
    if dtype == "bfloat16":
        step = engine.step
        engine.step = lambda work: torch.autocast("cpu", torch.bfloat16)(step)(work)
    return engine
