"""Goldens: what they hold, when they are found again, and when they are made anew."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.base.threads import one_thread
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo, reader
from harness.formats.taps import Kind
from harness.judge.compare import compare_run
from harness.oracle import make_golden as making_module
from harness.oracle.decode import greedy_continuation
from harness.oracle.golden import INFO_FILE, LOGIT_NOISE, NOISE_FILE, Golden, key_name, open_golden, write_golden_files
from harness.oracle.make_golden import cached_golden, golden_key, make_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt, batch_requests, padded

from .state import bits, surroundings
from .test_paired import pair

PROMPTS = (Prompt(token_ids=(5, 9, 200, 17, 31, 8), max_new_tokens=4), Prompt(token_ids=(44, 3, 90), max_new_tokens=1))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "goldens"


@pytest.fixture
def making(monkeypatch):
    """Count how often a golden is made."""
    made, make = [], make_golden

    def counting(hf, prompts, out, **kwargs):
        made.append(out)
        return make(hf, prompts, out, **kwargs)

    monkeypatch.setattr(making_module, "make_golden", counting)
    return made


@pytest.fixture
def own_checkpoint(checkpoints, tmp_path):
    """A copy of a checkpoint that the test may change."""
    folder = tmp_path / "llama-tiny"
    shutil.copytree(checkpoints / "llama-tiny", folder)
    return folder


def computed(hf):
    return {op.tap for op in hf.graph if not op.is_kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_what_a_golden_holds(load, tmp_path, name, dtype):
    hf = load(name, dtype)
    golden = make_golden(hf, PROMPTS, tmp_path / "golden")
    for request, prompt in zip(golden.requests, PROMPTS, strict=True):
        continuation = greedy_continuation(hf, prompt.token_ids, prompt.max_new_tokens)
        assert request.token_ids == [*prompt.token_ids, *continuation[:-1]]
        assert request.prompt_length == len(prompt.token_ids)
    assert {entry.name for entry in golden.recording.manifest.taps} == computed(hf)
    (step,) = golden.recording.steps  # one for a batch of requests
    rows = [(request.id, at) for request in golden.requests for at in range(len(request.token_ids))]
    assert list(zip(step.request.tolist(), step.position.tolist(), strict=True)) == rows
    wanted = {(r.id, at) for r in golden.requests for at in range(r.prompt_length - 1, len(r.token_ids))}
    sampled = step.rows_of("lm_head")
    assert {rows[at] for at in sampled.tolist()} == wanted
    assert step.sampled[sampled].tolist() == step.tap("lm_head").argmax(dim=1).tolist()
    assert (step.sampled >= 0).sum() == len(sampled)
    assert {tap for tap in step.tap_names if step.rows_of(tap) is not None} == {"lm_head"}
    assert list(golden.graph) == list(hf.graph)
    assert golden.graph.aliases == hf.graph.aliases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_golden_is_the_truth_of_each_request(load, tmp_path, dtype):
    """Whatever batch it was computed in."""
    hf = load("qwen3-tiny", dtype)
    golden = make_golden(hf, PROMPTS, tmp_path / "golden", truth="float64")
    (step,) = golden.recording.steps
    for request in golden.requests:
        indices = (step.request == request.id).nonzero()[:, 0]
        for tap, expected in pair(hf, request.token_ids).values["truth"].items():
            rows = step.rows_of(tap)
            if rows is None:
                actual = step.tap(tap)[indices]
            else:
                actual = step.tap(tap)[torch.isin(rows, indices)]
                expected = expected[step.position[rows[torch.isin(rows, indices)]]]
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@one_thread()  # of torch: workers have one each, and another number may sum in another order
def test_what_is_written_beside_the_forward_is_the_same(load, tmp_path, monkeypatch):
    hf = load("llama-tiny", torch.float32)
    alone = make_golden(hf, PROMPTS, tmp_path / "alone")
    monkeypatch.setattr(making_module, "num_spare_threads", lambda _device: 3)
    beside = make_golden(hf, PROMPTS, tmp_path / "beside")
    assert beside.recording.manifest == alone.recording.manifest, "the digests of the steps are in it"
    assert {tap: rows.tolist() for tap, rows in beside.noise.items()} == {
        tap: rows.tolist() for tap, rows in alone.noise.items()
    }


def test_requests_that_are_too_many_for_one_batch(load, tmp_path, monkeypatch):
    hf = load("llama-tiny")
    whole = make_golden(hf, PROMPTS, tmp_path / "whole")
    monkeypatch.setattr("harness.oracle.requests._LEAST_TOKENS", 1)
    monkeypatch.setattr("harness.oracle.requests._ACTIVATION_BYTES", 1)
    split = make_golden(hf, PROMPTS, tmp_path / "split")
    assert [len(step.request) for step in split.recording.steps] == [len(r.token_ids) for r in split.requests]
    for tap in computed(hf):
        parts = torch.cat([step.tap(tap) for step in split.recording.steps])
        torch.testing.assert_close(parts, whole.recording.steps[0].tap(tap), rtol=1e-9, atol=1e-12)
        assert len(split.noise[tap]) == len(parts)


def test_batches_keep_the_order_of_the_requests_and_fit_with_their_padding(load, monkeypatch):
    monkeypatch.setattr("harness.oracle.requests.batch_tokens", lambda _hf: 12)
    lengths = (3, 4, 3, 9, 2, 2, 30, 1)
    requests = [RequestInfo(id=at, token_ids=[7] * n, prompt_length=1) for at, n in enumerate(lengths)]
    groups = batch_requests(load("llama-tiny"), requests)
    assert [[request.id for request in group] for group in groups] == [[0, 1, 2], [3], [4, 5], [6], [7]]
    assert padded(requests[:2]).tolist() == [[7, 7, 7, 0], [7, 7, 7, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_that_of_hf_in_the_engines_dtype(load, tmp_path, dtype):
    hf = load("qwen2-tiny", dtype)
    golden = make_golden(hf, PROMPTS, tmp_path / "golden")
    noise = golden.noise
    num_rows = sum(len(request.token_ids) for request in golden.requests)
    assert noise.keys() == computed(hf) | {LOGIT_NOISE}
    for tap, rows in noise.items():
        assert rows.shape == (4 + 1 if tap in ("lm_head", LOGIT_NOISE) else num_rows,), tap
        assert torch.isfinite(rows).all(), tap
    assert (noise["model.embed_tokens"] == 0).all()
    eps = torch.finfo(dtype).eps
    assert 0.01 * eps < float(noise["lm_head"].median()) < 30 * eps
    # Row by row, against a plain forward of HF over the same batch.
    (step,) = golden.recording.steps
    truth, rows = step.tap("lm_head").double(), step.rows_of("lm_head")
    kept = sorted(set(step.position[rows].tolist()))
    call = {"input_ids": padded(golden.requests), "use_cache": False, "logits_to_keep": torch.tensor(kept)}
    with torch.no_grad():
        logits = hf.model(**call).logits.double()
    at = [kept.index(position) for position in step.position[rows].tolist()]
    error = logits[step.request[rows].long(), at] - truth
    torch.testing.assert_close(noise["lm_head"], error.norm(dim=1) / truth.norm(dim=1))
    torch.testing.assert_close(noise[LOGIT_NOISE], error.abs().amax(dim=1))


@pytest.mark.parametrize(
    ("dtype", "truth", "kept"),
    [
        (torch.float32, "auto", "F64"),
        (torch.bfloat16, "auto", "F32"),
        (torch.float16, "auto", "F32"),
        (torch.float32, "float32", "F32"),
        (torch.bfloat16, "float64", "F64"),
    ],
)
def test_the_truth_is_kept_as_it_was_computed(load, tmp_path, dtype, truth, kept):
    """Finer than the engine computes, and no wider."""
    golden = make_golden(load("llama-tiny", dtype), PROMPTS, tmp_path / "golden", truth=truth)
    assert {entry.dtype for entry in golden.recording.manifest.taps} == {kept}


def test_choices_of_a_router_are_kept_without_noise(tiny, tmp_path):
    hf = tiny("qwen3_moe", torch.bfloat16)
    golden = make_golden(hf, [Prompt(token_ids=(5, 9, 20), max_new_tokens=2)], tmp_path / "golden")
    choices = {op.tap for op in hf.graph if op.kind is Kind.CHOICE}
    dtypes = {entry.name: entry.dtype for entry in golden.recording.manifest.taps}
    assert {dtypes[tap] for tap in choices} == {"I64"}
    assert golden.noise.keys() == (computed(hf) | {LOGIT_NOISE}) - choices


def test_logits_that_are_capped_choose_the_tokens(tiny, tmp_path):
    hf = tiny("gemma2")
    golden = make_golden(hf, [Prompt(token_ids=(5, 9, 20), max_new_tokens=3)], tmp_path / "golden")
    (step,) = golden.recording.steps
    assert golden.graph.logits == "logits"
    assert step.rows_of("logits").tolist() == step.rows_of("lm_head").tolist() == [2, 3, 4]
    assert step.sampled.tolist()[2:] == step.tap("logits").argmax(dim=1).tolist()
    assert float(step.tap("logits").abs().max()) <= hf.config.final_logit_softcapping


def test_making_one_leaves_nothing_behind(hf, tmp_path):
    before, weights = surroundings(hf), bits(hf.model)
    make_golden(hf, PROMPTS, tmp_path / "golden")
    assert surroundings(hf) == before
    assert bits(hf.model) == weights


def test_a_golden_is_made_once(load, cache, making):
    first = cached_golden(load("llama-tiny"), PROMPTS)
    second = cached_golden(load("llama-tiny"), PROMPTS)
    assert len(making) == 1
    assert first.recording.path == second.recording.path
    name = key_name(golden_key(load("llama-tiny"), PROMPTS))
    assert [path.name for path in cache.iterdir()] == [name], "and nothing besides it"


def test_the_key_follows_the_prompts_the_dtype_and_the_truth(load):
    first, second = PROMPTS
    variants = [
        (first, second),
        (second, first),
        (first,),
        (first, Prompt(token_ids=second.token_ids, max_new_tokens=2)),
        (first, Prompt(token_ids=(*second.token_ids[:-1], 91), max_new_tokens=1)),
        (Prompt(token_ids=first.token_ids[:-1], max_new_tokens=4), second),
    ]
    keys = [golden_key(load("llama-tiny"), prompts) for prompts in variants]
    keys += [golden_key(load("llama-tiny", dtype), PROMPTS) for dtype in (torch.bfloat16, torch.float16)]
    keys += [golden_key(load("qwen2-tiny"), PROMPTS), golden_key(load("llama-tiny"), PROMPTS, "float32")]
    assert len({key_name(key) for key in keys}) == len(keys)
    assert golden_key(load("llama-tiny"), PROMPTS) == keys[0] == golden_key(load("llama-tiny"), PROMPTS, "float64")


def test_the_key_follows_config_and_weights(own_checkpoint, cache):
    opened = [load_model(own_checkpoint, dtype=torch.float32)]
    keys = [golden_key(opened[0], PROMPTS)]
    config = own_checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 2e-5}))
    opened.append(load_model(own_checkpoint, dtype=torch.float32))
    keys.append(golden_key(opened[1], PROMPTS))
    weights = own_checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    opened.append(load_model(own_checkpoint, dtype=torch.float32))
    keys.append(golden_key(opened[2], PROMPTS))
    assert len({key_name(key) for key in keys}) == 3
    assert [golden_key(hf, PROMPTS) for hf in opened] == keys  # a model keeps the key of the weights that it has


def test_no_golden_is_kept_of_a_checkpoint_that_changed_meanwhile(own_checkpoint, cache):
    hf = load_model(own_checkpoint, dtype=torch.float32)
    (own_checkpoint / "config.json").write_text((own_checkpoint / "config.json").read_text() + " ")
    with pytest.raises(HarnessError) as caught:
        cached_golden(hf, PROMPTS)
    assert caught.value.code is Code.CHECKPOINT_CHANGED
    assert not list(cache.iterdir())


def test_the_key_does_not_follow_the_folders_name(own_checkpoint, load):
    hf = load_model(own_checkpoint, dtype=torch.float32)
    assert golden_key(hf, PROMPTS) == golden_key(load("llama-tiny"), PROMPTS)


def truncate(folder):
    path = folder / "step-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def remove_step(folder):
    (folder / "step-00000.safetensors").unlink()


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def garble_manifest(folder):
    (folder / "manifest.json").write_text("{")


def empty_the_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def flip_a_bit(folder, file="step-00000.safetensors"):
    path = folder / file
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def flip_a_bit_of_the_noise(folder):
    """It is still some noise: finite, and of the right shape."""
    path = folder / NOISE_FILE
    before = {tap: rows.clone() for tap, rows in load_file(path).items()}
    save_file(before | {"model.norm": before["model.norm"] * 1.5}, path)


def remove_info(folder):
    (folder / INFO_FILE).unlink()


def garble_info(folder):
    (folder / INFO_FILE).write_text("{")


def info_of_another_golden(folder):
    path = folder / INFO_FILE
    info = json.loads(path.read_text())
    info["key"]["prompts"][0]["token_ids"][0] += 1
    path.write_text(json.dumps(info))


def steps_of_another_golden(folder):
    """Its key, its noise and its graph stay."""
    hf = load_model(folder.parents[2] / "llama-tiny", dtype=torch.float32)
    changed = (PROMPTS[0], Prompt(token_ids=(44, 3, 91), max_new_tokens=1))
    make_golden(hf, changed, folder.parent / "other")
    for file in ("manifest.json", "step-00000.safetensors"):
        (folder.parent / "other" / file).replace(folder / file)
    shutil.rmtree(folder.parent / "other")


def operation_that_nobody_judges(folder):
    path = folder / INFO_FILE
    info = json.loads(path.read_text())
    del info["operations"][5]
    path.write_text(json.dumps(info))


def info_of_a_later_version(folder):
    path = folder / INFO_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))


def remove_noise(folder):
    (folder / NOISE_FILE).unlink()


def truncate_noise(folder):
    path = folder / NOISE_FILE
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        remove_step,
        remove_manifest,
        garble_manifest,
        empty_the_folder,
        remove_noise,
        truncate_noise,
        flip_a_bit,
        flip_a_bit_of_the_noise,
        steps_of_another_golden,
        operation_that_nobody_judges,
        remove_info,
        garble_info,
        info_of_another_golden,
        info_of_a_later_version,
    ],
)
def test_a_damaged_golden_is_made_again(own_checkpoint, cache, making, damage):
    hf = load_model(own_checkpoint, dtype=torch.float32)
    whole = cached_golden(hf, PROMPTS)
    logits = whole.recording.steps[0].tap("lm_head").clone()
    whole.recording.close()
    damage(whole.recording.path)
    again = cached_golden(hf, PROMPTS)
    assert len(making) == 2
    (note,) = again.notes
    assert note.startswith("the golden in the cache was not used, and was made again: ")
    assert cached_golden(hf, PROMPTS).notes == (), "once is enough"
    assert torch.equal(again.recording.steps[0].tap("lm_head"), logits)
    assert LOGIT_NOISE in again.noise
    assert len(list(cache.iterdir())) == 1
    assert [path.name for path in cache.iterdir()] == [again.recording.path.name]
    again.recording.close()


def test_an_altered_golden_is_never_used(load, cache, tmp_path, monkeypatch):
    """Either it is made again, or the comparison says so: nothing is ever judged by an altered truth."""
    hf = load("llama-tiny")
    whole = cached_golden(hf, PROMPTS)
    whole.recording.close()
    sound = make_golden(hf, PROMPTS, tmp_path / "sound")
    flip_a_bit(whole.recording.path)
    check_digest = reader.check_digest

    def slowly(*args):  # a large file's digest comes later than the comparison's own look at it
        time.sleep(1)
        check_digest(*args)

    monkeypatch.setattr(reader, "check_digest", slowly)
    again = cached_golden(hf, PROMPTS)
    try:
        result = compare_run(sound.recording, again).result
    except HarnessError as error:
        assert error.code is Code.STEP_ALTERED  # noqa: PT017
    else:
        assert max(tap.max_abs for tap in result.taps) == 0


def test_noise_that_rounding_cannot_have_made_is_refused(load, tmp_path):
    """Its digest is right, but any engine would pass beside it; test_golden_files.py has the limit itself."""
    golden = make_golden(load("llama-tiny"), PROMPTS, tmp_path / "golden")
    noise = golden.noise | {"model.norm": golden.noise["model.norm"] * 1e4}
    write_golden_files(tmp_path / "golden", {}, golden.graph, noise)
    with pytest.raises(HarnessError, match=r"noise of model\.norm is too large for float32") as caught:
        open_golden(tmp_path / "golden")
    assert caught.value.code is Code.DAMAGED_SAFETENSORS


def test_two_that_make_the_same_golden_at_once_both_get_it(load, cache, making, monkeypatch):
    """Both find nothing, both make it; the rename of the second finds the first one's in place."""
    hf, both_made = load("llama-tiny"), threading.Barrier(2)
    lock, make = threading.Lock(), making_module._make

    def made_together(*args, **kwargs):
        with lock:  # two threads would share HF's registry of attention functions; two processes do not
            make(*args, **kwargs)
        both_made.wait(timeout=600)

    monkeypatch.setattr(making_module, "_make", made_together)
    goldens, errors = [], []

    def get():
        try:
            goldens.append(cached_golden(hf, PROMPTS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert errors == []
    assert len(making) == 2
    assert torch.equal(*(golden.recording.steps[0].tap("lm_head") for golden in goldens))
    assert len(list(cache.iterdir())) == 1


def test_a_golden_that_cannot_be_made_leaves_nothing(load, cache):
    long = Prompt(token_ids=tuple([7] * 512), max_new_tokens=1)
    with pytest.raises(HarnessError):
        cached_golden(load("llama-tiny"), [long])
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("factor", "tap"), [(300, "mlp.act"), (torch.nan, "mlp.gate_proj")])
def test_what_overflows_in_hf_itself_cannot_be_judged(checkpoints, cache, tmp_path, factor, tap):
    """Or has NaN in its weights: not a golden that is refused when it is read."""
    folder = Path(shutil.copytree(checkpoints / "qwen3-tiny", tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "layers.1.mlp" in name]:
        weights[name] = weights[name] * factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HarnessError) as caught:
        cached_golden(load_model(folder, dtype=torch.float16), PROMPTS)
    assert caught.value.code is Code.ORACLE_NOT_FINITE
    assert f"model.layers.1.{tap}" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_to(load, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(HarnessError) as caught:
        cached_golden(load("llama-tiny"), PROMPTS)
    assert caught.value.code is Code.CANNOT_WRITE


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        (Prompt(token_ids=(), max_new_tokens=1), Code.EMPTY_PROMPT, "request 1"),
        (Prompt(token_ids=(5, 256), max_new_tokens=1), Code.TOKEN_OUTSIDE_VOCABULARY, "request 1, position 1"),
        (Prompt(token_ids=(5, -1), max_new_tokens=1), Code.TOKEN_OUTSIDE_VOCABULARY, "-1"),
        (Prompt(token_ids=(5,), max_new_tokens=0), Code.BAD_OPTION, "max_new_tokens"),
        (Prompt(token_ids=(5,) * 513, max_new_tokens=1), Code.PROMPT_TOO_LONG, "513 prompt tokens + 1 new = 514"),
        (Prompt(token_ids=(5,) * 500, max_new_tokens=13), Code.PROMPT_TOO_LONG, "at most 512 positions"),
    ],
)
def test_prompts_that_cannot_be_served(load, tmp_path, prompt, code, said):
    with pytest.raises(HarnessError) as caught:
        make_golden(load("llama-tiny"), [PROMPTS[0], prompt], tmp_path / "golden")
    assert caught.value.code is code
    assert said in str(caught.value)
    assert not (tmp_path / "golden").exists()


def test_the_longest_prompt_that_can_be_served(load, tmp_path):
    make_golden(load("llama-tiny"), [Prompt(token_ids=(5,) * 511, max_new_tokens=1)], tmp_path / "golden")
    with Recording.open(tmp_path / "golden") as golden:
        assert sum(step.entry.num_rows for step in golden.steps) == 511


def test_progress_is_told(load, tmp_path):
    said, hf = [], load("llama-tiny")
    make_golden(hf, PROMPTS, tmp_path / "golden", progress=lambda *args: said.append(args))
    parts = len(hf.parts)
    assert said[:2] == [("continuation", 0, 2), ("continuation", 1, 2)]
    assert said[2:] == [("truth 1/1", part, parts) for part in range(1, parts + 1)]


# What is on the disk.


@pytest.fixture
def golden(load, tmp_path):
    return make_golden(load("qwen3-tiny", torch.bfloat16), PROMPTS, tmp_path / "golden")


def test_what_it_was_made_from_is_beside_it(load, golden):
    assert golden.info.key == golden_key(load("qwen3-tiny", torch.bfloat16), PROMPTS)
    assert golden.info.schema_version == 1
    key = golden.info.key
    assert {"weights", "config", "prompts", "dtype", "truth", "device", "torch", "transformers", "oracle"} <= key.keys()
    assert (key["dtype"], key["truth"]) == ("torch.bfloat16", "torch.float32")


def test_a_golden_of_the_first_version_is_read(golden):
    """It had one name for the noise of the logits, and nobody wrote the graph down."""
    path = golden.recording.path
    noise = dict(golden.noise)
    save_file(
        {"lm_head.max_abs" if tap == LOGIT_NOISE else tap: rows for tap, rows in noise.items()}, path / NOISE_FILE
    )
    (path / INFO_FILE).unlink()
    old = open_golden(path)
    assert old.info is None
    assert old.noise.keys() == noise.keys()
    assert torch.equal(old.noise[LOGIT_NOISE], noise[LOGIT_NOISE])
    assert [op.tap for op in old.graph] == [op.tap for op in golden.graph if op.kind is not Kind.CACHE]


def test_a_recording_without_noise_is_no_golden_and_can_be_compared_with(golden):
    path = golden.recording.path
    for file in (NOISE_FILE, INFO_FILE):
        (path / file).unlink()
    plain = Golden(Recording.open(path))
    assert (plain.noise, plain.info) == ({}, None)
    assert plain.requests == golden.requests
