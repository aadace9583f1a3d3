"""What attention reads: the latest keys and values of the same request, and never a history with holes."""

import pytest
import torch

from harness.compare.history import attention_inputs
from harness.compare.prefixes import Prefixes
from harness.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo
from harness.taps import decoder_graph

OPERATION = decoder_graph(num_layers=1, has_qk_norm=False)["model.layers.0.attention"]
Q, K, V = OPERATION.inputs
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3


def number(request, position, step):
    return 100 * request + position + step / 10


UNRELATED = {1: [1] * 20, 5: [5] * 20}


def record(path, steps, *, requests=UNRELATED, partial=None, lacking=None):
    """Steps are lists of (request, position); every value of a row is its `number`."""
    writer = RecordingWriter(
        path,
        producer=Producer(name="tests", version="1"),
        model=ModelInfo(id="tiny"),
        dtype="float64",
        device="cpu",
        environment={},
        requests=[RequestInfo(id=id_, token_ids=tokens, prompt_length=1) for id_, tokens in requests.items()],
    )
    shapes = {Q: (HEADS, HEAD_DIM), K: (KV_HEADS, HEAD_DIM), V: (KV_HEADS * HEAD_DIM,), OPERATION.tap: (12,)}
    with writer:
        for index, step in enumerate(steps):
            covered = {tap: rows for (at, tap), rows in (partial or {}).items() if at == index}
            writer.begin_step(
                phase="prefill",
                request=[request for request, _ in step],
                position=[position for _, position in step],
                partial_rows=covered or None,
            )
            values = torch.tensor([number(*row, index) for row in step], dtype=torch.float64)
            for tap, shape in shapes.items():
                if (index, tap) != lacking:
                    own = values[covered[tap]] if tap in covered else values
                    writer.tap(tap, own.view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous())
            writer.end_step()
    return Recording.open(path)


def epochs(recording):
    """Return per epoch (request, {query position: query number}, {key position: key number})."""
    found = []
    for rows, context, inputs in attention_inputs(OPERATION, recording.steps, Prefixes(recording.manifest.requests)):
        assert len(rows) == len(context) == len(inputs.query)
        assert rows.position.tolist() == inputs.query_position.tolist()
        assert inputs.query.shape[1:] == (HEADS, HEAD_DIM)
        assert torch.equal(inputs.key.flatten(1), inputs.value.flatten(1))
        assert torch.equal(context[:, 0], inputs.query[:, 0, 0])
        (request,) = set(rows.request.tolist())
        queries = dict(zip(rows.position.tolist(), inputs.query[:, 0, 0].tolist(), strict=True))
        keys = dict(zip(inputs.key_position.tolist(), inputs.key[:, 0, 0].tolist(), strict=True))
        assert len(keys) == len(inputs.key), "no position twice"
        assert [number(request, p, s) for p, s in zip(rows.position.tolist(), rows.step.tolist(), strict=True)] == list(
            queries.values()
        )
        found.append((request, queries, keys))
    return found


def expected(request, by_position):
    return {position: number(request, position, step) for position, step in by_position.items()}


def test_chunks_and_decode_steps_are_one_history(tmp_path):
    steps = [[(1, 0), (1, 1), (5, 0)], [(5, 1), (1, 2)], [(1, 3)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {0: 0, 1: 0, 2: 1, 3: 2}), expected(1, {0: 0, 1: 0, 2: 1, 3: 2})),
        (5, expected(5, {0: 0, 1: 1}), expected(5, {0: 0, 1: 1})),
    ]


def test_a_request_that_was_preempted_and_computed_anew(tmp_path):
    steps = [[(1, 0), (1, 1)], [(1, 2)], [(1, 0), (1, 1), (1, 2)], [(1, 3)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {0: 0, 1: 0, 2: 1}), expected(1, {0: 0, 1: 0, 2: 1})),
        (1, expected(1, {0: 2, 1: 2, 2: 2, 3: 3}), expected(1, {0: 2, 1: 2, 2: 2, 3: 3})),
    ]


def test_a_request_resumed_behind_what_was_kept(tmp_path):
    """Positions 0 and 1 stayed in the cache; 2 is computed again; what came after it is gone."""
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(1, 2)], [(1, 3)], [(1, 4)]]
    assert epochs(record(tmp_path / "r", steps))[1:] == [
        (1, expected(1, {2: 1, 3: 2, 4: 3}), expected(1, {0: 0, 1: 0, 2: 1, 3: 2, 4: 3})),
    ]


def test_a_third_epoch_reads_the_latest_of_both(tmp_path):
    steps = [[(1, 0), (1, 1), (1, 2)], [(1, 1), (1, 2)], [(1, 2)]]
    assert epochs(record(tmp_path / "r", steps))[2] == (
        1,
        expected(1, {2: 2}),
        expected(1, {0: 0, 1: 1, 2: 2}),
    )


def test_rows_of_a_step_in_any_order(tmp_path):
    steps = [[(1, 2), (5, 1), (1, 0), (5, 0), (1, 1)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {2: 0, 0: 0, 1: 0}), expected(1, {0: 0, 1: 0, 2: 0})),
        (5, expected(5, {1: 0, 0: 0}), expected(5, {0: 0, 1: 0})),
    ]


@pytest.mark.parametrize(
    ("partial", "lacking"),
    [
        ({(0, K): [0, 2]}, None),
        ({(0, V): [1, 2]}, None),
        (None, (0, K)),
        (None, (1, V)),
    ],
)
def test_a_history_with_holes_is_not_replayed(tmp_path, partial, lacking):
    steps = [[(1, 0), (1, 1), (1, 2)], [(1, 3)], [(1, 4)]]
    assert epochs(record(tmp_path / "r", steps, partial=partial, lacking=lacking)) == []


def test_the_other_request_is_replayed_all_the_same(tmp_path):
    steps = [[(1, 0), (5, 0)], [(1, 1), (5, 1)]]
    found = epochs(record(tmp_path / "r", steps, partial={(0, K): [1]}))
    assert [request for request, _, _ in found] == [5]


ALIKE = {1: [1, 2, 3, 4, 5], 5: [1, 2, 3, 9, 9], 7: [1, 2, 3, 4, 5]}


def test_a_beginning_found_in_the_cache_is_read_from_whoever_computed_it_first(tmp_path):
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(5, 2), (5, 3)], [(7, 3), (7, 4)]]
    by_request = {
        request: (queries, keys) for request, queries, keys in epochs(record(tmp_path / "r", steps, requests=ALIKE))
    }
    assert by_request[5] == (expected(5, {2: 1, 3: 1}), expected(1, {0: 0, 1: 0}) | expected(5, {2: 1, 3: 1}))
    assert by_request[7] == (expected(7, {3: 2, 4: 2}), expected(1, {0: 0, 1: 0, 2: 0}) | expected(7, {3: 2, 4: 2}))


@pytest.mark.parametrize(
    "steps",
    [
        [[(5, 0), (5, 1), (5, 2), (5, 3)], [(1, 4)]],  # position 3 holds another token
        [[(1, 2), (1, 3)], [(5, 0), (5, 1), (5, 2)]],  # computed only afterwards
    ],
)
def test_what_nobody_computed_before_is_a_hole(tmp_path, steps):
    assert 1 not in [request for request, _, _ in epochs(record(tmp_path / "r", steps, requests=ALIKE))]
