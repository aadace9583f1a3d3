import pytest
import torch

from harness.errors import Code

from ..conftest import BLOCK_SIZE
from .test_scores import TAP, K, V, attended


@pytest.mark.slow
def test_other_tensors(bench):
    k, v = bench.tap(K), bench.tap(V)
    wrong = {
        "K and V are swapped in the cache": (v, k),
        "values are read from the K cache": (k, k),
        "keys are read from the V cache": (v, v),
        "keys are cached before rotary": (bench.tap("model.layers.1.self_attn.k_norm"), v),
        "reads the cache of layer 0": (
            bench.tap("model.layers.0.k_rope"),
            bench.tap("model.layers.0.self_attn.v_proj"),
        ),
        "the KV cache is in a lower dtype: bfloat16": (k.bfloat16().double(), v.bfloat16().double()),
        "the V cache is in a lower dtype: float16": (k, v.half().double()),
    }
    for cause, (key, value) in wrong.items():
        assert bench.explain(TAP, attended(bench, key=key, value=value)).cause == cause


def moved(bench, source, target, *, request=0):
    """Keys and values with the content of some positions of request 0 put in the place of others."""
    rows = bench.rows()
    changed = []
    for name in (K, V):
        tensor = bench.tap(name)
        content = tensor.clone()
        for here, there in zip(source, target, strict=True):
            into = (rows.request == 0) & (rows.position == there)
            out_of = (rows.request == request) & (rows.position == here)
            tensor[into] = content[out_of]
        changed.append(tensor)
    return changed


def only_decode(bench, tensor):
    """The wrong rows are request 0's decode rows; the rest is right."""
    rows, result = bench.rows(), bench.tap(TAP)
    decode = (rows.request == 0) & (rows.position >= 37)
    result[decode] = tensor[decode]
    return result


def test_one_block_read_from_another_place(bench):
    key, value = moved(bench, range(8), range(8, 16))
    explanation = bench.explain(TAP, only_decode(bench, attended(bench, key=key, value=value)))
    assert explanation.cause == "reads one block of its history from a wrong place"
    begins = "the first bad row is at position 37 of request 0, where decode begins"
    assert explanation.detail == f"block 1 of the table is read from its own block 0; {begins}"
    assert explanation.scope == "decode rows of request 0"
    place = explanation.provenance
    assert (place.layer, place.request, place.position) == (1, 0, BLOCK_SIZE)
    assert place.holds == "the key of request 0, position 0"
    assert place.slot == place.block * BLOCK_SIZE


def test_one_position_read_from_another_place(bench):
    key, value = moved(bench, [4], [21], request=1)
    explanation = bench.explain(TAP, only_decode(bench, attended(bench, key=key, value=value)))
    assert explanation.cause == "reads one position of its history from a slot that another request wrote"
    assert "position 37 reads position 21 as request 1, position 4" in explanation.detail
    assert (explanation.provenance.position, explanation.provenance.holds) == (21, "the key of request 1, position 4")
    assert (explanation.provenance.writer_request, explanation.provenance.writer_step) == (0, 0)


def test_one_position_that_is_not_seen(bench):
    unseen = attended(bench, visible=lambda p, s, q, t: (q <= p) & (q != 16))
    explanation = bench.explain(TAP, only_decode(bench, unseen))
    assert explanation.cause == "does not see one position of its history"


def test_the_table_of_another_request(bench):
    rows = bench.rows()
    # In step 1 request 1 reads as many positions of request 0, whose blocks hold more.
    step = int(rows.step[(rows.request == 1) & (rows.position == 11)])
    at = ((rows.request == 1) & (rows.step == step)).nonzero()[0, 0]
    q = bench.tap("model.layers.1.q_rope").unflatten(1, (-1, bench.head_dim))[at]
    seen = ((rows.request == 0) & (rows.position < 12)).nonzero()[:, 0]
    k, v = (bench.tap(name).unflatten(1, (-1, bench.head_dim))[seen].repeat_interleave(3, dim=1) for name in (K, V))
    p = (torch.einsum("nh,snh->ns", q, k) * bench.head_dim**-0.5).softmax(-1)
    wrong = bench.tap(TAP)
    wrong[at] = torch.einsum("ns,snh->nh", p, v).flatten()
    explanation = bench.explain(TAP, wrong)
    assert explanation.cause == "reads the block table of another request"
    assert explanation.provenance.holds == "the key of request 0, position 0"


def with_slots(bench, taps, change):
    """The recording with taps replaced, and the slot mapping or the block tables of its steps changed."""
    parts = {}
    sizes = {name: [len(step.tap(name)) for step in bench.steps(name)] for name in taps}
    pieces = {name: tensor.to(bench.dtype).split(sizes[name]) for name, tensor in taps.items()}
    for name in taps:
        for step, piece in zip(bench.steps(name), pieces[name], strict=True):
            parts.setdefault(step.index, {})[name] = piece.view_as(step.tap(name))
    for step in bench.recording.steps:
        parts.setdefault(step.index, {}).update(change(step))
    return bench.replaced(parts)


def test_a_slot_mapping_that_does_not_follow_the_table(bench):
    rows = bench.rows()
    table = bench.recording.steps[0].block_tables[0]
    wrong_slot = table[0] * BLOCK_SIZE + 3  # position 8 goes where position 3 was

    def change(step):
        slots = step.slot_mapping
        if slots is None:
            return {}
        here = (step.request == 0) & (step.position == 8)
        return {"slot_mapping": torch.where(here, wrong_slot, slots)}

    key, value = moved(bench, [8], [3])
    zero = (rows.request == 0) & (rows.position == 8)
    key[zero], value[zero] = 0, 0
    taps = {TAP: only_decode(bench, attended(bench, key=key, value=value))}
    for name in ("k_cache", "v_cache"):
        read = bench.rows(f"model.layers.1.{name}")
        taps[f"model.layers.1.{name}"] = bench.tap(f"model.layers.1.{name}")
        taps[f"model.layers.1.{name}"][(read.request == 0) & (read.position == 8)] = 0
    recording = with_slots(bench, taps, change)
    explanation = bench.explained(recording, TAP)
    assert explanation.cause == "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    assert explanation.residual_after < 30
    assert explanation.provenance.position in (3, 8)


def test_a_block_that_belongs_to_two_requests(bench):
    rows = bench.rows()
    tables = bench.recording.steps[0].block_tables

    def change(step):
        if step.slot_mapping is None or not step.block_tables:
            return {}
        hypotheses = {request: list(blocks) for request, blocks in step.block_tables.items()}
        slots = step.slot_mapping.clone()
        if 1 in hypotheses:  # request 1's first block is given out a second time: to it, and to request 0 before
            hypotheses[1][0] = tables[0][1]
            mask = (step.request == 1) & (step.position < BLOCK_SIZE)
            slots[mask] = tables[0][1] * BLOCK_SIZE + step.position[mask].long()
        return {"slot_mapping": slots, "block_tables": hypotheses}

    key, value = moved(bench, range(8), range(8, 16), request=1)
    recording = with_slots(bench, {TAP: only_decode(bench, attended(bench, key=key, value=value))}, change)
    explanation = bench.explained(recording, TAP)
    assert (
        explanation.cause
        == "a block belongs to two requests of different content at once: shared, freed or given out wrongly"
    )
    assert (explanation.provenance.position, explanation.provenance.writer_request) == (8, 1)
    assert explanation.provenance.holds == "the key of request 1, position 0"
    assert int(rows.step.max()) > 0


def test_past_the_context(bench):
    rows = bench.rows()
    # Request 1 at position 11 reads the next slot of its block too: position 12's, that is written one step later.
    at = ((rows.request == 1) & (rows.position == 11)).nonzero()[0, 0]
    q = bench.tap("model.layers.1.q_rope").unflatten(1, (-1, bench.head_dim))[at]
    mask = ((rows.request == 1) & (rows.position <= 11)).nonzero()[:, 0]
    k, v = (bench.tap(name).unflatten(1, (-1, bench.head_dim))[mask].repeat_interleave(3, dim=1) for name in (K, V))
    e = (torch.einsum("nh,snh->ns", q, k) * bench.head_dim**-0.5).exp()
    wrong = bench.tap(TAP)
    wrong[at] = (torch.einsum("ns,snh->nh", e, v) / (e.sum(1, keepdim=True) + 1)).flatten()
    explanation = bench.explain(TAP, wrong)
    begins = "the first bad row is at position 11 of request 1, where decode begins"
    assert (explanation.cause, explanation.detail) == ("reads past the context length", f"one slot more; {begins}")


def test_rows_that_are_not_finite(bench):
    wrong = bench.tap(TAP)
    wrong[-1] = torch.nan
    explanation = bench.explain(TAP, wrong, code=Code.NOT_FINITE)
    assert explanation.cause.startswith(
        "not finite though all that it should read is: reads past the context length, or "
    )
    assert not explanation.is_cause
