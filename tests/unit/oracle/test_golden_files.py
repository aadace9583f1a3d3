"""The files of a golden by hand: a small recording, its noise and what it was made from, each altered in turn."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.golden import (
    _MOST_NOISE,
    INFO_FILE,
    LOGIT_NOISE,
    NOISE_FILE,
    _num_rows,
    key_name,
    open_golden,
    read_graph,
    write_golden_files,
    write_graph,
)

from ...recording_writer import new_writer, requests_of

GRAPH = Graph((
    Operation(tap="model.embed_tokens", kind=Kind.EMBEDDING, shape=(2,)), Operation(tap="model.norm", kind=Kind.NORM),
    Operation(tap="lm_head", kind=Kind.LINEAR, sampled_only=True, is_head=True, inputs=("model.norm",)),
), {"logits": "lm_head"})  # fmt: skip
UNIT = rounding_unit(torch.bfloat16)


def recorded(folder, dtype="bfloat16"):
    """Two requests; logits [3, 4] of the last row of each alone."""
    with new_writer(folder, requests_of({0: [1, 2, 3], 1: [1, 2, 3]}, prompt_length=2), dtype=dtype) as writer:
        for request in range(2):
            writer.begin_step(
                phase="prefill",
                request=[request] * 3,
                position=[0, 1, 2],
                partial_rows={"lm_head": [1, 2][: 2 - request]},
            )
            for tap in ("model.embed_tokens", "model.norm", "other"):
                writer.tap(tap, torch.ones(3, 2))
            writer.tap("lm_head", torch.tensor([[3.0, 4.0], [6.0, 8.0]])[: 2 - request])
            writer.end_step()
    return folder


def noise_of(**changed):
    noise = {
        "model.embed_tokens": torch.zeros(6),
        "model.norm": torch.full((6,), UNIT),
        "lm_head": torch.full((3,), UNIT),
    }
    noise[LOGIT_NOISE] = torch.full((3,), 0.1 * UNIT)
    return {name: x.double() for name, x in (noise | changed).items()}


def golden(folder, **changed):
    recorded(folder)
    write_golden_files(folder, {"a": 1}, GRAPH, noise_of(**changed))
    return open_golden(folder)


def refused(folder, code, says):
    with pytest.raises(HarnessError) as caught:
        open_golden(folder)
    assert caught.value.code is code
    assert says in str(caught.value)
    return caught.value


def test_what_was_written_is_read(tmp_path):
    opened = golden(tmp_path / "g")
    assert opened.graph == GRAPH
    assert opened.info.key == {"a": 1}
    assert {tap: x.tolist() for tap, x in opened.noise.items()} == {tap: x.tolist() for tap, x in noise_of().items()}
    assert [request.id for request in opened.requests] == [0, 1]
    assert (opened.notes, opened.is_pool) == ((), False)
    assert _num_rows(opened.recording) == {"model.embed_tokens": 6, "model.norm": 6, "other": 6, "lm_head": 3}


def test_another_recording_has_neither_noise_nor_a_graph_of_its_own(tmp_path):
    recorded(tmp_path / "r")
    opened = open_golden(tmp_path / "r")
    assert (opened.noise, opened.info) == ({}, None)
    assert "lm_head" in opened.graph


@pytest.mark.parametrize("field", ["key", "aliases", "noise_sha256", "manifest_sha256", "sha256"])
def test_an_altered_description_is_refused(tmp_path, field):
    golden(tmp_path / "g")
    path = tmp_path / "g" / INFO_FILE
    info = json.loads(path.read_text())
    info[field] = {"b": "c"} if isinstance(info[field], dict) else "0" * 64
    path.write_text(json.dumps(info))
    refused(tmp_path / "g", Code.BAD_MANIFEST, "sha256 differs")


def test_an_operation_that_reads_no_operation_of_the_golden_is_refused(tmp_path):
    """A tap's name was damaged and the description signed again: H099 said a KeyError."""
    opened = golden(tmp_path / "g")
    first, *others = opened.info.operations
    damaged = opened.info.model_copy(
        update={"operations": (first.model_copy(update={"inputs": ("model.nrm",)}), *others)}
    )
    (tmp_path / "g" / INFO_FILE).write_text(damaged.model_copy(update={"sha256": damaged.digest()}).model_dump_json())
    error = refused(tmp_path / "g", Code.BAD_MANIFEST, "cannot be read")
    assert "reads model.nrm, which is no operation of the golden" in str(error.__cause__)


def test_a_description_that_is_none_is_refused(tmp_path):
    golden(tmp_path / "g")
    (tmp_path / "g" / INFO_FILE).write_text("{}")
    error = refused(tmp_path / "g", Code.BAD_MANIFEST, "cannot be read")
    assert error.what.endswith("validation errors for GoldenInfo"), "the first of many lines"


def test_a_description_of_a_later_version_is_refused(tmp_path):
    info = golden(tmp_path / "g").info.model_copy(update={"schema_version": 2})
    (tmp_path / "g" / INFO_FILE).write_text(info.model_copy(update={"sha256": info.digest()}).model_dump_json())
    assert "schema_version" in str(refused(tmp_path / "g", Code.BAD_MANIFEST, "cannot be read").__cause__)


def test_the_manifest_and_the_noise_are_those_it_was_made_with(tmp_path):
    golden(tmp_path / "g")
    manifest = tmp_path / "g" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text + " ")
    refused(tmp_path / "g", Code.BAD_MANIFEST, "not the one that it was made with")
    manifest.write_text(text)
    save_file(noise_of(lm_head=torch.full((3,), 0.9 * UNIT)), tmp_path / "g" / NOISE_FILE)
    refused(tmp_path / "g", Code.DAMAGED_SAFETENSORS, "not the one that was measured")
    (tmp_path / "g" / NOISE_FILE).write_bytes(b"x")
    refused(tmp_path / "g", Code.DAMAGED_SAFETENSORS, "cannot be read")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model.norm": torch.zeros(5)}, "noise of model.norm has shape [5]"),
        ({"model.norm": torch.zeros(6, 1)}, "noise of model.norm has shape [6, 1]"),
        ({"lm_head": torch.zeros(6)}, "noise of lm_head has shape [6]"),
        ({LOGIT_NOISE: torch.zeros(2)}, f"noise of {LOGIT_NOISE} has shape [2]"),
        ({"unknown": torch.zeros(6)}, "noise of unknown has shape [6]"),
        ({"model.norm": torch.tensor([0, 0, 0, 0, 0, -1e-9])}, "not finite, or negative"),
        ({"model.norm": torch.tensor([0, 0, 0, 0, 0, math.inf])}, "not finite, or negative"),
        ({"model.norm": torch.tensor([math.nan, 0, 0, 0, 0, 0])}, "not finite, or negative"),
    ],
)
def test_noise_that_is_none(tmp_path, changed, says):
    recorded(tmp_path / "g")
    write_golden_files(tmp_path / "g", {}, GRAPH, noise_of(**changed))
    refused(tmp_path / "g", Code.DAMAGED_SAFETENSORS, says)
    (tmp_path / "g" / INFO_FILE).unlink()  # as in goldens of the first version
    refused(tmp_path / "g", Code.DAMAGED_SAFETENSORS, says)


def limit(depth):
    return min(1.0, _MOST_NOISE * UNIT * math.sqrt(depth))


@pytest.mark.parametrize(
    ("tap", "num_rows", "depth"),
    [("model.embed_tokens", 6, 1), ("model.norm", 6, 2), ("lm_head", 3, 3), ("other", 6, 4)],
)
def test_noise_may_be_as_large_as_roundings_so_far_can_make_it(tmp_path, tap, num_rows, depth):
    """By its median: half of the rows may be worse."""
    for name, share, is_fine in (("a", 0.999, True), ("b", 1.001, False)):
        values = torch.full((num_rows,), limit(depth) * share)
        values[: num_rows // 2] = 0.99
        if is_fine:
            golden(tmp_path / name, **{tap: values, LOGIT_NOISE: torch.zeros(3)})
            continue
        recorded(tmp_path / name)
        values[: num_rows // 2 + (num_rows % 2 == 0)] = limit(depth) * share
        write_golden_files(tmp_path / name, {}, GRAPH, noise_of(**{tap: values, LOGIT_NOISE: torch.zeros(3)}))
        error = refused(tmp_path / name, Code.DAMAGED_SAFETENSORS, f"noise of {tap} is too large for bfloat16")
        assert error.expected == f"a median of at most {limit(depth):.2g}"


@pytest.mark.parametrize(("share", "is_fine"), [(1.0, True), (1 + 1e-5, False)])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_no_logit_is_further_off_than_its_row(tmp_path, share, is_fine, row):
    """The norms of the logits are 5, 10 and 5."""
    values = torch.zeros(3, dtype=torch.float64)
    values[row] = UNIT * (5.0, 10.0, 5.0)[row] * share
    changed = {LOGIT_NOISE: values, "lm_head": torch.full((3,), UNIT, dtype=torch.float64)}
    if is_fine:
        golden(tmp_path / "g", **changed)
        return
    recorded(tmp_path / "g")
    write_golden_files(tmp_path / "g", {}, GRAPH, noise_of(**changed))
    refused(tmp_path / "g", Code.DAMAGED_SAFETENSORS, f"noise of {LOGIT_NOISE} is larger than that of lm_head")


def test_the_name_of_a_key_tells_it_from_any_other():
    assert key_name({"a": 1, "b": 2}) == key_name({"b": 2, "a": 1})
    assert key_name({"a": 1}) != key_name({"a": 2})
    assert len(key_name({})) == 32


def test_a_graph_is_kept_by_what_it_depends_on(tmp_path):
    path = tmp_path / "graphs" / "one.json"
    assert read_graph(path, {"config": "a"}) is None
    write_graph(path, {"config": "a"}, GRAPH)
    assert read_graph(path, {"config": "a"}) == GRAPH
    assert read_graph(path, {"config": "b"}) is None
    path.write_bytes(path.read_bytes()[:-9])
    assert read_graph(path, {"config": "a"}) is None
    write_graph(tmp_path / "graphs" / "one.json" / "below a file", {}, GRAPH)
