"""vLLM step by step: every phase and every operation of a layer has its span."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.engines.stepping import COMMIT, PREPARE, SAMPLE, open_session
from harness.errors import Code, HarnessError
from harness.extensions.vllm import open_engine

pytestmark = pytest.mark.slow
LAYER = [
    "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_norm", "q_rope", "attention", "self_attn.o_proj",
    "attn_residual", "mlp.gate_proj", "mlp.act", "mlp.down_proj",
]  # fmt: skip


class Watcher:
    def __init__(self):
        self.shapes, self.names = [], []

    def begin_step(self, shape):
        self.shapes.append(shape)

    def reached(self, name):
        self.names.append(name)


def session(folder):
    engine = open_engine(folder, dtype="float32", device="cpu", options={})
    return open_session(engine, max_num_tokens=64, max_num_seqs=2)


def test_the_steps_of_two_requests(checkpoints):
    opened = session(checkpoints / "qwen3-tiny")
    try:
        keys = [opened.add(prompt, 3) for prompt in ([5, 6, 7, 8], [9, 10])]
        watcher = Watcher()
        with opened.watching(watcher):
            made = [list(opened.step()) for _ in range(3)]
        assert made == [keys] * 3
        assert [shape.phase for shape in watcher.shapes] == ["prefill", "decode", "decode"]
        assert (watcher.shapes[0].query_lens, watcher.shapes[2].context_lens) == ((4, 2), (6, 4))
        first = watcher.names[: watcher.names.index(COMMIT) + 1]
        assert first[:3] == [PREPARE, "model.embed_tokens", "model.layers.0.input_layernorm"]
        assert [name for name in first if name.startswith("model.layers.1.")] == [
            f"model.layers.1.{site}" for site in (*LAYER, "output")
        ]
        assert first[-4:] == ["model.layers.2.output", "lm_head", SAMPLE, COMMIT]
        assert watcher.names.count(SAMPLE) == 3
        opened.add([1, 2], 1)
        opened.step()
        assert watcher.names.count(SAMPLE) == 3, "nothing is left of the watcher"
    finally:
        opened.close()


def test_a_family_whose_operations_profiles_do_not_know(families):
    with pytest.raises(HarnessError) as caught:
        session(families["qwen3_moe"])
    assert (caught.value.code, caught.value.actual) == (Code.ENGINE_CANNOT_SERVE, "qwen3_moe")
