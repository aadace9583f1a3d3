"""llama2.c, of the GitHub repository karpathy/llama2.c: a C program, whose arrays are dumped.

`LLAMA2C` names a folder with a program for each mistake, and one called `none`. Each computes the tokens of its arguments,
one at a time, and appends the arrays of `forward` to files NAME.LAYER.f32 in the folder `DUMP`: 25 lines of C.
"""

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DTYPES = ("float32",)
ONE_TOKEN_A_STEP = True


def export(folder, out):
    """Write the checkpoint as llama2.c has it: neighbouring elements of queries and keys are rotated together."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layers, size = range(config["num_hidden_layers"]), config["head_dim"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

    def of_layers(name, pairs=False):
        for at in layers:
            weight = weights[f"model.layers.{at}.{name}.weight"]
            yield weight.reshape(-1, 2, size // 2, weight.shape[1]).swapaxes(1, 2) if pairs else weight

    arrays = [weights["model.embed_tokens.weight"], *of_layers("input_layernorm")]
    arrays += [*of_layers("self_attn.q_proj", True), *of_layers("self_attn.k_proj", True)]
    arrays += [*of_layers("self_attn.v_proj"), *of_layers("self_attn.o_proj"), *of_layers("post_attention_layernorm")]
    arrays += [*of_layers("mlp.gate_proj"), *of_layers("mlp.down_proj"), *of_layers("mlp.up_proj")]
    arrays += [weights["model.norm.weight"], np.zeros(256 * size, np.float32), weights["lm_head.weight"]]
    header = struct.pack("7i", *(config[name] for name in names), -config["vocab_size"], 256)
    out.write_bytes(header + b"".join(np.ascontiguousarray(item).tobytes() for item in arrays))


def run(program, model, ids, out):
    out.mkdir()
    subprocess.run([program, model, *map(str, ids)], check=True, env={"DUMP": str(out)})
    for path in out.glob("*.f32"):
        np.save(path.with_suffix(".npy"), np.fromfile(path, np.float32).reshape(len(ids), -1))
        path.unlink()


# mistakes
def dump(folder, dtype, fault, ids, out):
    export(folder, folder / "model.bin")
    run(Path(os.environ["LLAMA2C"]) / (fault or "none"), folder / "model.bin", ids, out)
