"""Evidence of wrong rows, attention with every part open to change against torch's own, and the guard."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.taps import KINDS, Kind, Operation
from harness.judge.compare import conventions as registry
from harness.judge.compare import row_judge
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import spread
from harness.judge.compare.evidence import MAX_ROWS, AttentionContext, Evidence, guarded, histories, merged
from harness.oracle.watch import AttentionCall

from .judgements import floats, rows_of

LINEAR, ATTENTION = (Operation(tap=kind, kind=kind, inputs=("x", "y")) for kind in (Kind.LINEAR, Kind.ATTENTION))


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [0]),
        (2, [0, 5]),
        (3, [0, 3, 6]),
        (4, [0, 2, 5, 7]),
        (9, [*range(9)]),
        (10, [*range(10)]),
        (11, [*range(10)]),
    ],
)
def test_items_are_spread_over_all(count, expected):
    assert spread([100 + at for at in range(10)], count) == [100 + at for at in expected]


def evidence(rows, *, operation=LINEAR, held=()):
    """Of rows whose figures are told by their request and position."""
    numbers = floats([100 * request + position for request, position in rows])
    return Evidence(
        operation=operation, rows=rows_of(rows), expected=numbers[:, None] + floats([[0.0, 0.5]]),
        inputs=[numbers[:, None], 2 * numbers[:, None]] if operation is LINEAR else [], roundings=numbers + 1,
        bound=numbers + 2, dtype=torch.bfloat16, views=tuple(held),
    )  # fmt: skip


def check(evidence, rows):
    assert list(zip(evidence.rows.request.tolist(), evidence.rows.position.tolist(), strict=True)) == rows
    numbers = [100 * request + position for request, position in rows]
    assert evidence.expected[:, 1].tolist() == [number + 0.5 for number in numbers]
    assert evidence.roundings.tolist() == [number + 1 for number in numbers]
    assert evidence.bound.tolist() == [number + 2 for number in numbers]
    if evidence.operation is LINEAR:
        assert evidence.inputs[0][:, 0].tolist() == numbers
        assert evidence.inputs[1][:, 0].tolist() == [2 * number for number in numbers]
    assert evidence.dtype is torch.bfloat16


def test_batches_are_put_together_in_the_order_of_requests_and_positions():
    check(merged([evidence([(3, 1), (1, 9)])]), [(1, 9), (3, 1)])
    parts = [evidence([(3, 1), (1, 9)]), evidence([(1, 2), (3, 0)]), evidence([(2, 2**20)])]
    check(merged(parts), [(1, 2), (1, 9), (2, 2**20), (3, 0), (3, 1)])


def test_no_more_rows_are_kept_than_of_one_batch():
    parts = [evidence([(0, at + MAX_ROWS * part) for at in range(MAX_ROWS)]) for part in range(2)]
    check(merged(parts), [(0, at) for at in range(0, 2 * MAX_ROWS, 2)])


def held(number):
    nothing = torch.zeros(0)
    return AttentionContext(
        rows=rows_of([]), query=nothing, key=nothing, value=nothing, key_step=nothing, scale=number, window=None
    )


def test_of_attention_all_rows_stay_as_they_are():
    whole = evidence([(3, 1), (1, 9)], operation=ATTENTION, held=[held(0)])
    check(merged([whole]), [(3, 1), (1, 9)])
    both = merged([whole, evidence([(0, 0)], operation=ATTENTION, held=[held(at) for at in range(1, 8)])])
    check(both, [(3, 1), (1, 9), (0, 0)])
    assert [view.scale for view in both.views] == [0, 1, 2, 3, 4, 5]


# Histories.

SIZE, TOKENS = 2, 4


class Sequence:
    """Rows of steps 10, 11, ..., of which some are its own."""

    def __init__(self, length, is_own):
        self.step, self.is_own = torch.arange(10, 10 + length), torch.tensor([at in is_own for at in range(length)])

    def __len__(self):
        return len(self.step)


def batch_of(num_sequences, length=TOKENS - 1):
    sequences = [Sequence(length, {1, 2}) for _ in range(num_sequences)]
    return SimpleNamespace(
        num_tokens=TOKENS, sequences=sequences,
        rows=lambda places: rows_of([divmod(place, TOKENS) for place in places.tolist()]),
    )  # fmt: skip


def call_of(num_sequences, **options):
    shape = (num_sequences, 4, TOKENS, SIZE)
    query = torch.arange(float(torch.Size(shape).numel())).view(shape)
    module = nn.Module()
    return AttentionCall(
        path="", module=module, query=query, key=-query[:, :2], value=query[:, 2:] / 2, mask=None, options=options
    )


def test_the_history_behind_a_row():
    call = call_of(3, scaling=0.3, sliding_window=5, softcap=20.0, s_aux=torch.arange(4.0).view(4, 1))
    (first, second), places = histories(batch_of(3), call, torch.tensor([10, 2, 9]))
    assert places.tolist() == [2, 9, 10]
    assert second.rows.request.tolist() == [2, 2]
    assert second.rows.position.tolist() == [1, 2]
    for history, line, positions in ((first, 0, [2]), (second, 2, [1, 2])):
        assert torch.equal(history.query, call.query[line, :, positions].transpose(0, 1).double())
        assert torch.equal(history.key, call.key[line, :, :3].transpose(0, 1).double())
        assert torch.equal(history.value, call.value[line, :, :3].transpose(0, 1).double())
        assert {x.dtype for x in (history.query, history.key, history.value)} == {torch.float64}
        assert history.key_step.tolist() == [-1, 11, 12]
        assert (history.scale, history.softcap) == (0.3, 20.0)
        assert torch.equal(history.sinks, floats([0, 1, 2, 3]))


def test_without_options_there_is_neither_cap_nor_sink_nor_window():
    ((history,), _) = histories(batch_of(1), call_of(1), torch.tensor([1]))
    assert (history.softcap, history.sinks, history.window) == (None, None, None)
    assert history.scale == pytest.approx(SIZE**-0.5)


def test_of_many_requests_and_rows_some_are_kept():
    num = 12
    actual, places = histories(batch_of(num), call_of(num), torch.arange(num * TOKENS))
    assert [int(history.rows.request[0]) for history in actual] == [0, 2, 4, 6, 8, 10]
    assert len(places) == 6 * TOKENS
    wide = SimpleNamespace(num_tokens=48, sequences=[Sequence(48, {1})], rows=batch_of(1).rows)
    x = torch.zeros(1, 4, 48, SIZE)
    call = AttentionCall(path="", module=nn.Module(), query=x, key=x, value=x, mask=None, options={})
    assert histories(wide, call, torch.arange(48).flip(0))[1].tolist() == list(range(0, 48, 2))


GENERATOR = torch.Generator().manual_seed(5)
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 6, 4, 2, 8


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


QUERY, KEY, VALUE = random(LENGTH, HEADS, HEAD_DIM), *(random(LENGTH, KV_HEADS, HEAD_DIM) for _ in range(2))


def view(step=None, key_step=None, **parts):
    fields = {"window": None, "scale": HEAD_DIM**-0.5, **parts}
    zeros = torch.zeros(LENGTH, dtype=torch.int64)
    rows = Rows(request=zeros, position=torch.arange(LENGTH), step=zeros if step is None else torch.tensor(step))
    return AttentionContext(
        rows=rows,
        query=QUERY,
        key=KEY,
        value=VALUE,
        key_step=zeros if key_step is None else torch.tensor(key_step),
        **fields,
    )


def sdpa(mask, *, scale=HEAD_DIM**-0.5, key=KEY, value=VALUE, heads=(0, 0, 1, 1)):
    q, k, v = QUERY.transpose(0, 1), *(x[:, list(heads)].transpose(0, 1) for x in (key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return attended.transpose(0, 1).flatten(1)


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_the_definition_is_torchs():
    assert torch.allclose(view().attend(), sdpa(CAUSAL))


def test_a_window_hides_what_lies_before_it():
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    assert torch.allclose(view(window=3).attend(), sdpa(CAUSAL & (distance < 3)))
    assert view(window=3).visible()[5].tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("change", [
    {"scale": 0.1}, {"key": random(LENGTH, KV_HEADS, HEAD_DIM)}, {"value": random(LENGTH, KV_HEADS, HEAD_DIM)},
])  # fmt: skip
def test_a_part_is_replaced(change):
    assert torch.allclose(view().attend(**change), sdpa(CAUSAL, **change))


def test_query_heads_may_read_other_kv_heads():
    heads = torch.tensor([1, 0, 0, 1])
    assert torch.allclose(view().attend(heads=heads), sdpa(CAUSAL, heads=heads.tolist()))


def test_a_row_that_sees_nothing_is_zero():
    mask = CAUSAL.clone()
    mask[2] = False
    assert view().attend(visible=mask)[2].abs().max() == 0


def test_sinks_take_their_share_and_give_nothing():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    plain, with_sinks = (item.attend().unflatten(1, (HEADS, -1)) for item in (view(), view(sinks=sinks)))
    weights = view().scores().masked_fill(~CAUSAL, -torch.inf).exp().sum(dim=-1).T
    share = weights / (weights + sinks.exp())
    assert torch.allclose(with_sinks, plain * share[..., None])


def test_a_soft_cap_bounds_the_scores():
    capped = view(softcap=0.7).scores()
    assert torch.allclose(capped, 0.7 * torch.tanh(view().scores() / 0.7))


def test_which_keys_a_step_has_and_where_it_begins():
    steps = [0, 0, 0, 1, 1, 2]
    context = view(step=steps, key_step=steps)
    assert context.first_of_step.tolist() == [0, 0, 0, 3, 3, 5]
    assert context.is_computed[3].tolist() == [True] * 5 + [False]
    assert context.is_computed[0].tolist() == [True] * 3 + [False] * 3


def test_selected_rows_keep_their_history():
    keep = torch.tensor([False, True, False, False, True, False])
    assert torch.allclose(view().select(keep).attend(), view().attend()[keep])
    assert view().select(keep).rows.position.tolist() == [1, 4]


CONVENTIONS = registry.all_conventions()
WRONG = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.q_rope",
    "model.layers.0.attention",
    "model.layers.0.mlp.act",
    "model.norm",
    "logits",
)


def test_what_was_raised_is_noted_with_its_place():
    failures = []
    for _ in range(2):
        with guarded("a convention", failures):
            registry.attention.scaling(None)
    (note,) = failures
    assert note.startswith("a convention: AttributeError: 'NoneType' object has no attribute")
    assert note.rpartition(":")[0].endswith("(harness/oracle/attention.py")
    assert note.rpartition(":")[2].rstrip(")").isdigit()


def test_what_others_raise_is_noted_too():
    failures = []
    with guarded("a convention", failures):
        raise KeyError
    assert failures[0].startswith("a convention: KeyError (test_evidence.py:")


@pytest.mark.parametrize("error", [HarnessError(Code.STEP_ALTERED, "altered"), KeyboardInterrupt()])
def test_what_the_reader_must_know_is_raised(error):
    with pytest.raises(type(error)), guarded("a convention", []):
        raise error


def raising(convention):
    def alternatives(_subject):
        yield from ()
        raise ZeroDivisionError(convention.name)

    return replace(convention, alternatives=alternatives)


@pytest.fixture(scope="module")
def wrong(bench, tmp_path_factory):
    """A recording with a wrong operation of every kind that a convention is for; its logits are capped."""
    one = bench("gemma2")
    assert {one.hf.graph[tap].kind for tap in WRONG} == {
        kind for convention in CONVENTIONS for kind in convention.kinds
    }
    copy = one.recorded()
    for step in copy.computing():
        for tap in WRONG:
            if tap in step.taps:
                step.taps[tap] = step.taps[tap] * 1.5
    return one, copy.write(tmp_path_factory.mktemp("wrong") / "r")


def judged(wrong, monkeypatch, conventions):
    one, recording = wrong
    monkeypatch.setattr(registry, "all_conventions", lambda: tuple(conventions))
    return one.compare(recording)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(CONVENTIONS)))
def test_each_convention_may_raise(wrong, monkeypatch, number):
    conventions = list(CONVENTIONS)
    broken = conventions[number]
    without = judged(wrong, monkeypatch, [convention for convention in conventions if convention is not broken])
    conventions[number] = raising(broken)
    result = judged(wrong, monkeypatch, conventions)
    assert [(tap.name, tap.verdict) for tap in result.taps] == [(tap.name, tap.verdict) for tap in without.taps]
    for finding, expected in zip(result.findings, without.findings, strict=True):
        message, _, note = finding.message.partition("; conventions that could not be tried: ")
        assert message == expected.message
        is_noted = f"{broken.name}: ZeroDivisionError: {broken.name} (harness/judge/compare/row_judge.py:" in note
        assert is_noted == (wrong[0].hf.graph[finding.tap].kind in broken.kinds)
    assert {finding.tap for finding in result.findings} >= set(WRONG)


def test_a_convention_whose_numbers_raise(wrong, monkeypatch):
    """What a convention yields computes later: that is guarded as well."""

    def expected():
        raise ValueError("late")

    (eager, *_) = (convention for convention in CONVENTIONS if Kind.NORM in convention.kinds)
    late = row_judge.Rounding(name="late", model=KINDS[Kind.NORM].error_model, expected=expected)
    result = judged(wrong, monkeypatch, [replace(eager, alternatives=lambda _subject: iter([late]))])
    assert any("ValueError: late" in finding.message for finding in result.findings)


def test_logits_that_no_module_shows_are_judged(wrong):
    """Gemma 2 without its cap, and any other model whose logits are scaled by no module, raised here."""
    one, recording = wrong
    (finding,) = (finding for finding in one.compare(recording).findings if finding.tap == one.hf.graph.logits)
    assert finding.code is Code.LOCAL_ERROR
    assert "could not be tried" not in finding.message
