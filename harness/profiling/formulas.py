"""FLOPs and bytes that each operation of a decoder needs, from the model's sizes and the step's rows alone.

docs/profiling.md derives them. Bytes are those of operations that are computed one by one: each reads its inputs and
its weights once and writes its output once. An engine that fuses operations moves fewer bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.engines.stepping import ExpertsLoad, ModelShape
from harness.formats.taps import EMBEDDING, FINAL_NORM, LOGITS
from harness.results.profile import StepShape


def causal_pairs(num_queries: int, context_len: int) -> int:
    """Return the pairs of the last `num_queries` of `context_len` positions, each with itself and all before it.

    The keys that were there before the first query make a rectangle, the queries among themselves a triangle:
    T (C - T) + T (T + 1) / 2.
    """
    num_before = context_len - num_queries
    return num_queries * num_before + num_queries * (num_queries + 1) // 2


def visible_pairs(num_queries: int, context_len: int, window: int | None) -> int:
    """Return the pairs where each position sees no more than its latest `window` positions, itself included.

    Position i sees min(i + 1, window) keys: each query loses the causal keys beyond the window.
    """
    pairs = causal_pairs(num_queries, context_len)
    if window is None or context_len <= window:
        return pairs
    longest = context_len - window
    """Keys that the last query does not see; each query before it misses one fewer, down to none."""
    shortest = max(0, longest - num_queries + 1)
    return pairs - (shortest + longest) * (longest - shortest + 1) // 2


_ID_BYTES = 8
"""Of one token id, int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one operation, over all layers and steps of a request for costs."""

    site: str
    """Tap name without the layer."""
    flops: int = 0
    """FLOPs of matrix products and attention; a multiply-add counts as two."""
    elementwise_flops: int = 0
    bytes_moved: int = 0

    def __add__(self, addend: "Cost") -> "Cost":
        """Add costs; the name stays."""
        return Cost(
            site=self.site,
            flops=self.flops + addend.flops,
            elementwise_flops=self.elementwise_flops + addend.elementwise_flops,
            bytes_moved=self.bytes_moved + addend.bytes_moved,
        )


def operation_costs(model: ModelShape, steps: Sequence[StepShape]) -> dict[str, Cost]:
    """Return the cost of each operation by its site, summed over layers and steps, in the order of computation."""
    total: dict[str, Cost] = {}
    for step in steps:
        for cost in _step_costs(model, step):
            total[cost.site] = total[cost.site] + cost if cost.site in total else cost
    return total


def kv_bytes(model: ModelShape, steps: Iterable[StepShape]) -> int:
    """Return the bytes of K and V that these steps store: those of each of their rows, once.

    2 * layers * kv_heads * head_dim * dtype bytes for each token.
    """
    return model.kv_bytes_per_token * sum(step.num_rows for step in steps)


def _step_costs(model: ModelShape, step: StepShape) -> Iterator[Cost]:
    num_rows, hidden = step.num_rows, model.hidden_size
    moved = num_rows * hidden * (_weight_size(model) + model.itemsize)
    yield Cost(site=EMBEDDING, bytes_moved=round(moved) + num_rows * _ID_BYTES)
    for layer in range(model.num_layers):
        yield from _attention_costs(model, step, model.windows[layer])
        yield from _mlp_costs(model, step, model.experts.get(layer))
    yield _norm(FINAL_NORM, num_rows, hidden, model.itemsize)
    yield _linear(model, LOGITS, step.num_sampled, hidden, model.vocab_size)


def _attention_costs(model: ModelShape, step: StepShape, window: int | None) -> Iterator[Cost]:
    rows, size, hidden = step.num_rows, model.itemsize, model.hidden_size
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield _norm("input_layernorm", rows, hidden, size)
    for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        yield _linear(model, f"self_attn.{name}_proj", rows, hidden, width, has_bias=model.qkv_bias)
    if model.has_qk_norm:
        yield _norm("self_attn.q_norm", rows * model.num_heads, model.head_dim, size)
        yield _norm("self_attn.k_norm", rows * model.num_kv_heads, model.head_dim, size)
    yield _rotary("q_rope", rows, model.num_heads, model.head_dim, size)
    yield _rotary("k_rope", rows, model.num_kv_heads, model.head_dim, size)
    for name in ("k_cache", "v_cache"):
        yield Cost(site=name, bytes_moved=round(rows * kv_width * (size + _kv_size(model))))
    yield _attention(model, step, window)
    yield _linear(model, "self_attn.o_proj", rows, q_width, hidden, has_bias=model.o_bias)
    if model.has_norms_behind:
        yield _norm("post_attention_layernorm", rows, hidden, size)
    yield _add("attn_residual", rows * hidden, size)


def _mlp_costs(model: ModelShape, step: StepShape, experts: ExpertsLoad | None) -> Iterator[Cost]:
    rows, size, hidden, ffn = step.num_rows, model.itemsize, model.hidden_size, model.intermediate_size
    before = "pre_feedforward_layernorm" if model.has_norms_behind else "post_attention_layernorm"
    yield _norm(before, rows, hidden, size)
    if experts is not None:
        yield from _experts_costs(model, experts, rows)
    else:
        yield _linear(model, "mlp.gate_proj", rows, hidden, ffn, has_bias=model.mlp_bias)
        yield _linear(model, "mlp.up_proj", rows, hidden, ffn, has_bias=model.mlp_bias)
        yield Cost(site="mlp.act", elementwise_flops=2 * rows * ffn, bytes_moved=3 * rows * ffn * size)
        yield _linear(model, "mlp.down_proj", rows, ffn, hidden, has_bias=model.mlp_bias)
    if model.has_norms_behind:
        yield _norm("post_feedforward_layernorm", rows, hidden, size)
    yield _add("output", rows * hidden, size)


def _experts_costs(model: ModelShape, experts: ExpertsLoad, rows: int) -> Iterator[Cost]:
    """Count a router's product and softmax, and three products for each expert of each row.

    Sizes do not tell which experts the rows choose, so the weights of the most experts that they can choose count as
    read.
    """
    hidden, size = model.hidden_size, model.itemsize
    yield _linear(model, "mlp.gate", rows, hidden, experts.num_experts)
    scores = rows * experts.num_experts
    yield Cost(site="mlp.gate.topk", elementwise_flops=3 * scores, bytes_moved=2 * scores * size)
    num_pairs, ffn = rows * experts.num_chosen, experts.intermediate_size
    num_read = min(experts.num_experts, num_pairs)
    yield Cost(
        site="mlp.experts",
        flops=6 * num_pairs * hidden * ffn,
        elementwise_flops=2 * num_pairs * (ffn + hidden),
        bytes_moved=(3 * num_read * hidden * ffn + num_pairs * (2 * hidden + 6 * ffn)) * size,
    )


def _weight_size(model: ModelShape) -> float:
    return model.weight_itemsize or model.itemsize


def _kv_size(model: ModelShape) -> float:
    return model.kv_itemsize or model.itemsize


def _linear(model: ModelShape, site: str, rows: int, num_in: int, num_out: int, *, has_bias: bool = False) -> Cost:
    """[rows, num_in] times [num_in, num_out]."""
    if not rows:
        return Cost(site=site)
    moved = (rows * num_in + rows * num_out + num_out * has_bias) * model.itemsize
    moved += round(num_in * num_out * _weight_size(model))
    return Cost(site=site, flops=2 * rows * num_in * num_out, bytes_moved=moved)


def _norm(site: str, rows: int, width: int, size: int) -> Cost:
    """Square, mean, scale and weight of each element; epsilon and root of each row."""
    return Cost(site=site, elementwise_flops=4 * rows * width + 2 * rows, bytes_moved=(2 * rows * width + width) * size)


def _rotary(site: str, rows: int, num_heads: int, head_dim: int, size: int) -> Cost:
    """Compute x cos + rotate_half(x) sin: two products and a sum of each element, and a sign of every other one."""
    elements = rows * num_heads * head_dim
    moved = 2 * elements + 2 * rows * head_dim
    return Cost(site=site, elementwise_flops=3 * elements + elements // 2, bytes_moved=moved * size)


def _attention(model: ModelShape, step: StepShape, window: int | None) -> Cost:
    """2 FLOPs for q k and 2 for p v, for each element of a head and each pair of a row and a key that it sees."""
    requests = list(zip(step.query_lens, step.context_lens, strict=True))
    num_pairs = sum(visible_pairs(num_rows, context_len, window) for num_rows, context_len in requests)
    num_keys = sum(
        context_len if window is None else min(context_len, num_rows + window - 1) for num_rows, context_len in requests
    )
    moved = 2 * step.num_rows * model.num_heads * model.itemsize + 2 * num_keys * model.num_kv_heads * _kv_size(model)
    return Cost(
        site="attention",
        flops=4 * num_pairs * model.num_heads * model.head_dim,
        bytes_moved=round(moved * model.head_dim),
    )


def _add(site: str, elements: int, size: int) -> Cost:
    return Cost(site=site, elementwise_flops=elements, bytes_moved=3 * elements * size)
