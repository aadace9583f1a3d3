"""Mutated recordings: the reader refuses them with a HarnessError or reads them, and does nothing else."""

import hashlib
import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.formats.recording import Recording, RequestInfo

from ...recording_writer import new_writer

SETTINGS = settings(max_examples=150, suppress_health_check=list(HealthCheck))
STEP = "step-00000.safetensors"
MANIFEST = "manifest.json"

SNIPPETS = [
    b'"', b"{", b"}", b"[", b"]", b",", b"-", b"0", b"1", b"9" * 30, b"null", b"true", b"NaN", b"1e400", b"\0", b"\xff",
    b"\\ud800", b'"rows.', b'"kv.', b"../", b"I64", b"F4", b"[[" * 5_000, b" " * 64, b'"shape":[]', b'"__metadata__":{',
]  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "recording"
    requests = [
        RequestInfo(id=0, token_ids=[1, 2, 3], prompt_length=2),
        RequestInfo(id=5, token_ids=[1], prompt_length=1),
    ]
    with new_writer(path, requests, environment={"threads": 1}, expected_taps=1) as writer:
        writer.begin_step(
            phase="mixed", request=[0, 0, 5], position=[0, 1, 0], sampled_rows=[1, 2], slot_mapping=[0, 1, 16],
            block_tables={0: [0], 5: [1]}, partial_rows={"lm_head": [1, 2]},
        )  # fmt: skip
        writer.tap("model.norm", torch.ones(3, 2, dtype=torch.bfloat16))
        writer.tap("lm_head", torch.ones(2, 3))
        writer.end_step([3, 3])
    return path


@st.composite
def mutation(draw, content):
    """Return `content` after one to four changes: flips, cuts, insertions, splices of its own bytes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start, stop = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        stop = min(stop, start + draw(st.sampled_from([1, 8, 64, 10_000])))
        match draw(st.sampled_from(["flip", "truncate", "insert", "replace", "splice"])):
            case "flip" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "truncate":
                del data[start:]
            case "insert":
                data[start:start] = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=8))
            case "replace":
                data[start:stop] = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=8))
            case "splice":
                place = draw(st.integers(0, len(data)))
                data[place:place] = data[start:stop]
    return bytes(data)


def read_all(path):
    """Read everything that a recording offers; return whether it was refused."""
    try:
        with Recording.open(path) as recording:
            for step in recording.steps:
                _ = step.request, step.position, step.sampled, step.slot_mapping, step.block_tables
                for name in step.tap_names:
                    rows = step.rows_of(name)
                    assert len(step.tap(name)) == (len(step.request) if rows is None else len(rows))
                    step.tap(name).double().sum()
    except HarnessError as error:
        str(error).encode()  # printable
        return True
    return False


def with_numbers_fixed(path):
    """Give the manifest the size and digest that the step file now has."""
    content = (path / STEP).read_bytes()
    manifest = json.loads((path / MANIFEST).read_bytes())
    manifest["steps"][0] |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(manifest))


def copy(template, tmp_path):
    path = tmp_path / "mutant"
    shutil.rmtree(path, ignore_errors=True)
    return shutil.copytree(template, path)


def test_the_template_reads(template):
    assert not read_all(template)


@SETTINGS
@given(data=st.data())
def test_mutated_manifest(template, tmp_path, data):
    path = copy(template, tmp_path)
    (path / MANIFEST).write_bytes(data.draw(mutation((path / MANIFEST).read_bytes())))
    read_all(path)


@SETTINGS
@given(data=st.data(), fixed=st.booleans())
def test_mutated_step(template, tmp_path, data, fixed):
    path = copy(template, tmp_path)
    content = (path / STEP).read_bytes()
    mutant = data.draw(mutation(content))
    (path / STEP).write_bytes(mutant)
    if fixed:
        with_numbers_fixed(path)
    assert read_all(path) or fixed or mutant == content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SIZES = st.lists(st.integers(-1, 5) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3)


@st.composite
def mutated_header(draw, content):
    """Change the JSON of a step file's header by its values, and keep the length field right."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    names = list(header)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names))
        is_entry = isinstance(header.get(name), dict)
        match draw(st.sampled_from(["drop", "rename", "dtype", "shape", "data_offsets", "any"])):
            case "drop":
                header.pop(name, None)
            case "rename" if name in header:
                new_name = draw(st.sampled_from([*names, "__metadata__"]) | st.text(max_size=10))
                header[new_name] = header.pop(name)
            case "dtype" if is_entry:
                header[name]["dtype"] = draw(st.sampled_from(["F32", "I32", "I64", "F4", "U8", "C64"]) | JSON)
            case "shape" | "data_offsets" as key if is_entry:
                header[name][key] = draw(SIZES | JSON)
            case "any":
                header[name] = draw(JSON)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@SETTINGS
@given(data=st.data())
def test_mutated_header_with_its_digest_right(template, tmp_path, data):
    path = copy(template, tmp_path)
    (path / STEP).write_bytes(data.draw(mutated_header((path / STEP).read_bytes())))
    with_numbers_fixed(path)
    read_all(path)


@SETTINGS
@given(data=st.data())
def test_mutated_index_tensors_with_their_digest_right(template, tmp_path, data):
    path = copy(template, tmp_path)
    content = bytearray((path / STEP).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(begin, len(content) - 4))
        content[place : place + 4] = data.draw(st.sampled_from([-1, 0, 1, 2, 3, 5])).to_bytes(4, "little", signed=True)
    (path / STEP).write_bytes(content)
    with_numbers_fixed(path)
    read_all(path)
