"""FLOPs and bytes from what lies on disk alone: shapes in safetensors headers, sizes in config.json, a loop over pairs.

Nothing of the harness's own formulas is used, so that a mistake in them and in the counters cannot hide each other.
"""

import json
import struct

import pytest

from harness.profiling.counters import count
from harness.profiling.formulas import operation_costs
from harness.profiling.load import CaptureSchedule, ProfileRequests, dry_run, window

PROMPTS = (tuple(range(10, 27)), tuple(range(30, 47)))
NUM_PROMPT, NUM_NEW = 17, 5
MODELS = ("qwen3-tiny", "qwen2-tiny", "llama-tiny")


class OnDisk:
    """A checkpoint as its files say it is."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        shapes: dict[str, list[int]] = {}
        for path in folder.glob("*.safetensors"):
            raw = path.read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            header = json.loads(raw[8 : 8 + length])
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        self.in_layers = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
        self.biases = sum(s[0] for n, s in shapes.items() if ".layers." in n and n.endswith(".bias"))
        self.head = shapes["model.embed_tokens.weight"]
        heads = self.config["num_attention_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        self.query_width = heads * self.head_dim
        self.key_width = self.config["num_key_value_heads"] * self.head_dim
        self.num_layers = self.config["num_hidden_layers"]

    def flops(self, num_rows: int, num_requests: int, num_pairs: int) -> int:
        """Two for each weight and row, of the head one row a request, and twice two for each pair and element."""
        products = sum(out * inner for out, inner in self.in_layers) * num_rows
        products += self.head[0] * self.head[1] * num_requests
        return 2 * products + 4 * num_pairs * self.query_width * self.num_layers

    def product_bytes(self, num_rows: int, num_requests: int) -> int:
        """Weights once, each row's input and output once, in float32."""
        layers = sum(out * inner + num_rows * (out + inner) for out, inner in self.in_layers) + self.biases
        out, inner = self.head
        return 4 * (layers + out * inner + num_requests * (out + inner))


def pairs(num_rows: int, num_cached: int) -> int:
    """Count the pairs of a row and a position that it sees, one by one."""
    return sum(1 for row in range(num_rows) for seen in range(num_cached + num_rows) if seen <= num_cached + row)


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


@pytest.mark.parametrize("engine", ["reference", "hf"])
def test_flops_and_stored_bytes_follow_from_the_files(open_on, checkpoints, engine, model):
    disk = OnDisk(checkpoints / model)
    session = open_on(engine, model=model)
    load = ProfileRequests(prompts=PROMPTS, max_new_tokens=(NUM_NEW,) * len(PROMPTS))
    steps = dry_run(session, load)
    everything = CaptureSchedule(wait=0, warmup=0, active=100)

    prefill = count(session, window("prefill", load, steps, everything))
    assert prefill.flops == disk.flops(2 * NUM_PROMPT, 2, 2 * pairs(NUM_PROMPT, 0))

    decode = count(session, window("decode", load, steps, everything))
    num_steps = NUM_NEW - 1
    seen = sum(2 * pairs(1, NUM_PROMPT + step) for step in range(num_steps))
    assert decode.flops == disk.flops(2 * num_steps, 2 * num_steps, seen)
    num_stored = 2 * (NUM_PROMPT + num_steps)
    assert decode.kv_bytes == num_stored * 2 * disk.key_width * disk.num_layers * 4


def test_bytes_of_the_products_follow_from_the_files(open_on, checkpoints, model):
    disk = OnDisk(checkpoints / model)
    session = open_on("hf", model=model)
    load = ProfileRequests(prompts=PROMPTS, max_new_tokens=(NUM_NEW,) * len(PROMPTS))
    captured = window("prefill", load, dry_run(session, load), CaptureSchedule())
    costs = operation_costs(session.model, captured.shapes)
    products = sum(cost.bytes_moved for name, cost in costs.items() if name.endswith("_proj") or name == "lm_head")
    assert products == disk.product_bytes(2 * NUM_PROMPT, 2)
