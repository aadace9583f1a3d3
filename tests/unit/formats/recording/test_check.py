"""A step file's tensors against the manifest: what is refused, with its values."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.formats.recording.check import StepRules
from harness.formats.safetensors_header import TensorEntry

MANIFEST = SimpleNamespace(
    taps=[SimpleNamespace(name="a", dtype="F32", shape=[2, 3]), SimpleNamespace(name="b", dtype="BF16", shape=[])],
    requests=[RequestInfo(id=id_, token_ids=[1] * num, prompt_length=1) for id_, num in {9: 4, 2: 1}.items()],
)
RULES = StepRules(MANIFEST)
NAMES = {torch.int32: "I32", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}


def ints(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def step(**changed):
    """Three rows of a sound step, of which some tensors are others, or gone."""
    tensors = {
        "rows.request": ints([9, 2, 9], torch.int32), "rows.position": ints([0, 0, 3], torch.int32),
        "rows.sampled": ints([-1, 5, 0]), "kv.slot_mapping": ints([7, -1, 0]), "kv.requests": ints([2, 9], torch.int32),
        "kv.block_table": ints([[3, -1], [0, 4]], torch.int32), "rows.of.a": ints([2, 0]), "a": torch.zeros(2, 2, 3),
        "b": torch.zeros(3, dtype=torch.bfloat16),
    }  # fmt: skip
    return {name: x for name, x in (tensors | changed).items() if x is not None}


def check(tensors):
    entries = {
        name: TensorEntry(name=name, dtype=NAMES[x.dtype], shape=tuple(x.shape), begin=0, end=x.nbytes)
        for name, x in tensors.items()
    }
    RULES.check(Path("file"), SimpleNamespace(num_rows=3), entries, tensors.__getitem__)


def test_a_sound_step():
    check(step())
    check(step(**{"kv.requests": None, "kv.block_table": None, "rows.sampled": None, "rows.of.a": None, "a": None}))
    check(step(**{"rows.of.a": ints([]), "a": torch.zeros(0, 2, 3)}))


@pytest.mark.parametrize(
    ("changed", "where", "expected", "actual"),
    [
        ({"rows.request": None}, "file", "rows.request", None),
        ({"rows.position": None}, "file", "rows.position", None),
        ({"kv.requests": None}, "file", None, None),
        ({"kv.block_table": None}, "file", None, None),
        ({"rows.request": ints([9, 2, 9])}, "file: 'rows.request'", "I32 [3]", "I64 [3]"),
        ({"rows.position": ints([0, 0], torch.int32)}, "file: 'rows.position'", "I32 [3]", "I32 [2]"),
        ({"rows.sampled": ints([0, 0])}, "file: 'rows.sampled'", "I64 [3]", "I64 [2]"),
        ({"rows.sampled": ints([0, 0, 0], torch.int32)}, "file: 'rows.sampled'", "I64 [3]", "I32 [3]"),
        ({"kv.slot_mapping": ints([[1, 2, 3]])}, "file: 'kv.slot_mapping'", "I64 [3]", "I64 [1, 3]"),
        ({"kv.requests": ints([2, 9])}, "file: 'kv.requests'", "I32 [2]", "I64 [2]"),
        ({"kv.requests": ints(2, torch.int32)}, "file: 'kv.requests'", "I32 [0]", "I32 []"),
        ({"kv.requests": ints([[2, 9]], torch.int32)}, "file: 'kv.requests'", "I32 [1]", "I32 [1, 2]"),
        ({"kv.block_table": ints([[1], [2], [3]], torch.int32)}, "file: 'kv.block_table'", "I32 [2, 1]", "I32 [3, 1]"),
        ({"kv.block_table": ints([1, 2], torch.int32)}, "file: 'kv.block_table'", "I32 [2, 0]", "I32 [2]"),
        ({"rows.of.a": ints([[2, 0]])}, "file: 'rows.of.a'", "I64 [1]", "I64 [1, 2]"),
        ({"rows.of.a": ints(1)}, "file: 'rows.of.a'", "I64 [0]", "I64 []"),
        ({"a": torch.zeros(3, 2, 3)}, "file: 'a'", "F32 [2, 2, 3]", "F32 [3, 2, 3]"),
        ({"rows.of.a": None}, "file: 'a'", "F32 [3, 2, 3]", "F32 [2, 2, 3]"),
        ({"b": torch.zeros(3)}, "file: 'b'", "BF16 [3]", "F32 [3]"),
        ({"b": torch.zeros(3, 1, dtype=torch.bfloat16)}, "file: 'b'", "BF16 [3]", "BF16 [3, 1]"),
        ({"b": torch.tensor(1.0)}, "file: 'b'", "BF16 [3]", "F32 []"),
        ({"c": torch.zeros(3)}, "file: 'c'", "one of the manifest's taps", None),
        ({"rows.c": ints([0, 1])}, "file: 'rows.c'", "one of the manifest's taps", None),
        ({"kv.c": torch.zeros(3)}, "file: 'kv.c'", "one of the manifest's taps", None),
        ({"rows.of.a": ints([3, 0])}, "file: rows.of.a", "different indices from 0 to 2", 3),
        ({"rows.of.a": ints([1, 1])}, "file: rows.of.a", "different indices from 0 to 2", 1),
        ({"rows.sampled": ints([0, -2, -3])}, "file: rows.sampled", None, -3),
        ({"kv.slot_mapping": ints([0, -2, 0])}, "file: kv.slot_mapping", None, -2),
        ({"kv.block_table": ints([[1, -2], [0, 0]], torch.int32)}, "file: kv.block_table", None, -2),
        ({"rows.request": ints([9, 3, 9], torch.int32)}, "file: row 1", None, 3),
        ({"rows.position": ints([-1, 0, 3], torch.int32)}, "file: row 0", "0 to 3 for request 9", -1),
        ({"rows.position": ints([0, 0, 4], torch.int32)}, "file: row 2", "0 to 3 for request 9", 4),
        ({"rows.position": ints([0, 1, 4], torch.int32)}, "file: row 1", "0 to 0 for request 2", 1),
        ({"kv.requests": ints([2, 7], torch.int32)}, "file: kv.requests", None, 7),
        ({"kv.requests": ints([2, 2], torch.int32)}, "file: kv.requests", None, [2, 2]),
    ],
)
def test_what_contradicts_the_manifest(changed, where, expected, actual):
    with pytest.raises(HarnessError) as caught:
        check(step(**changed))
    error = caught.value
    assert error.code is Code.STEP_MALFORMED
    assert (str(error.where), error.expected, error.actual) == (where, expected, actual)
