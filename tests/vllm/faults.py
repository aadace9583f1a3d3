"""Seven bugs, each put into vLLM itself: into its modules, its backend for the CPU, its sampler."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.block_table import BlockTable


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A bug and where it must be found."""

    name: str
    inject: Callable[..., None]
    """Puts it in, given pytest's monkeypatch."""
    tap: str
    """First tap that is wrong; `tokens` where none is."""
    cause: str
    """What the report must say of it."""
    schedule: str = "plain"
    """One that shows it."""


def wrapped(monkeypatch, owner, name, change):
    """Replace a function by `change(before, *args, **kwargs)`."""
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(before, *args, **kwargs))


def rotary_position(monkeypatch):
    """In decode, positions are one too high."""

    def forward(before, self, positions, *rest, **named):
        return before(self, positions + (len(positions) == 1), *rest, **named)

    wrapped(monkeypatch, RotaryEmbedding, "forward", forward)


def eps(monkeypatch):
    def build(before, self, hidden_size, eps=1e-6, *rest, **named):
        return before(self, hidden_size, 1e-5 if eps < 5e-6 else 1e-6, *rest, **named)

    wrapped(monkeypatch, RMSNorm, "__init__", build)


def softmax_scale(monkeypatch):
    """Of the hidden size instead of the head size."""

    def build(before, self, num_heads, head_size, scale, *rest, **named):
        return before(self, num_heads, head_size, (num_heads * head_size) ** -0.5, *rest, **named)

    wrapped(monkeypatch, CPUAttentionBackendImpl, "__init__", build)


def slot(monkeypatch):
    """The first token of every block but a request's first goes into the slot after its own."""

    def compute(before, self, num_reqs, query_start_loc, positions):
        before(self, num_reqs, query_start_loc, positions)
        is_first = (positions > 0) & (positions % self.block_size == 0)
        self.slot_mapping.gpu[: len(positions)] += is_first

    wrapped(monkeypatch, BlockTable, "compute_slot_mapping", compute)


def block_table(monkeypatch):
    """In a batch, each request reads the next one's blocks."""

    def build(before, self, *args, **named):
        metadata = before(self, *args, **named)
        metadata.block_table = metadata.block_table.roll(1, dims=0)
        return metadata

    wrapped(monkeypatch, CPUAttentionMetadataBuilder, "build", build)


def kv_heads(monkeypatch):
    """Queries read the other KV head."""

    def forward(before, self, layer, query, key, value, kv_cache, *rest, **named):
        return before(self, layer, query, key, value, kv_cache.flip(1).contiguous(), *rest, **named)

    wrapped(monkeypatch, CPUAttentionBackendImpl, "forward", forward)


def token_choice(monkeypatch):
    """The second best token is chosen."""
    monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(lambda logits: logits.topk(2, dim=-1).indices[:, 1]))


L0 = "model.layers.0."
FAULTS = (
    Fault(name="rotary-position", inject=rotary_position, tap=L0 + "q_rope", cause="position off by one (+1)"),
    Fault(name="eps", inject=eps, tap=L0 + "input_layernorm", cause="wrong eps: 1e-05 instead of 1e-06"),
    Fault(name="softmax-scale", inject=softmax_scale, tap=L0 + "attention", cause="scale is 0.0721688 instead of"),
    Fault(name="slot", inject=slot, tap=L0 + "k_cache", cause="written to a wrong slot"),
    Fault(
        name="block-table", inject=block_table, tap=L0 + "attention", cause="block table of another request",
        schedule="batched",
    ),
    Fault(name="kv-heads", inject=kv_heads, tap=L0 + "attention", cause="wrong KV heads"),
    Fault(name="token-choice", inject=token_choice, tap="tokens", cause="the second largest logit is chosen"),
)  # fmt: skip
