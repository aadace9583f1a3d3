"""Goldens: what they hold, when they are found again, and when they are made anew."""

import json
import shutil
import threading
import time

import pytest
import torch

from harness.compare import compare_run
from harness.errors import Code, HarnessError
from harness.oracle import golden as golden_module
from harness.oracle.decoder import load_decoder
from harness.oracle.golden import (
    LOGIT_NOISE,
    NOISE_FILE,
    Prompt,
    cached_golden,
    golden_key,
    greedy_continuation,
    make_golden,
    record_dtype,
)
from harness.recording import reader
from harness.taps import Kind

from .state import bits, surroundings

PROMPTS = (Prompt(token_ids=(5, 9, 200, 17, 31, 8), max_new_tokens=4), Prompt(token_ids=(44, 3, 90), max_new_tokens=1))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "goldens"


@pytest.fixture
def making(monkeypatch):
    """Count how often a golden is made."""
    made, make = [], make_golden

    def counting(decoder, prompts, out, **kwargs):
        made.append(out)
        return make(decoder, prompts, out, **kwargs)

    monkeypatch.setattr(golden_module, "make_golden", counting)
    return made


@pytest.fixture
def own_checkpoint(checkpoints, tmp_path):
    """A copy of a checkpoint that the test may change."""
    folder = tmp_path / "llama-tiny"
    shutil.copytree(checkpoints / "llama-tiny", folder)
    return folder


def hf_generate(decoder, prompt):
    ids = torch.tensor([prompt.token_ids])
    output = decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_new_tokens,
        min_new_tokens=prompt.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_the_continuation_is_that_of_generate(load, token_ids, name, dtype):
    decoder = load(name, dtype)
    prompt = Prompt(token_ids=tuple(token_ids), max_new_tokens=9)
    continuation = greedy_continuation(decoder, prompt)
    assert continuation == hf_generate(decoder, prompt)
    assert len(set(continuation)) > 1


def test_the_continuation_goes_on_behind_an_end_of_text_token(load, token_ids):
    decoder = load("llama-tiny")
    prompt = Prompt(token_ids=tuple(token_ids), max_new_tokens=5)
    first = greedy_continuation(decoder, prompt)[0]
    config = decoder.model.generation_config
    before = config.eos_token_id
    try:
        config.eos_token_id = first
        assert len(greedy_continuation(decoder, prompt)) == 5
    finally:
        config.eos_token_id = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_golden_holds(decoder, load, tmp_path, dtype):
    decoder = load(decoder.folder.name, dtype)
    golden = make_golden(decoder, PROMPTS, tmp_path / "golden")
    requests = golden.requests
    for request, prompt in zip(requests, PROMPTS, strict=True):
        continuation = greedy_continuation(decoder, prompt)
        assert request.token_ids == [*prompt.token_ids, *continuation[:-1]]
        assert request.prompt_length == len(prompt.token_ids)
    taps = {op.tap for op in decoder.graph if op.kind is not Kind.CACHE}
    assert {entry.name for entry in golden.recording.manifest.taps} == taps
    for step, request in zip(golden.recording.steps, requests, strict=True):
        assert step.position.tolist() == list(range(len(request.token_ids)))
        assert step.request.tolist() == [request.id] * len(request.token_ids)
        sampled = step.rows_of("lm_head")
        assert sampled.tolist() == list(range(request.prompt_length - 1, len(request.token_ids)))
        assert step.sampled[sampled].tolist() == step.tap("lm_head").argmax(dim=1).tolist()
        assert (step.sampled >= 0).sum() == len(sampled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_that_of_hf_in_the_engines_dtype(load, tmp_path, dtype):
    decoder = load("qwen2-tiny", dtype)
    golden = make_golden(decoder, PROMPTS, tmp_path / "golden")
    noise = golden.noise
    num_rows = sum(len(request.token_ids) for request in golden.requests)
    assert noise.keys() == {op.tap for op in decoder.graph if op.kind is not Kind.CACHE} | {LOGIT_NOISE}
    for tap, rows in noise.items():
        assert rows.shape == (4 + 1 if tap in ("lm_head", LOGIT_NOISE) else num_rows,), tap
        assert torch.isfinite(rows).all(), tap
    assert (noise["model.embed_tokens"] == 0).all()
    eps = torch.finfo(dtype).eps
    assert 0.01 * eps < float(noise["lm_head"].median()) < 30 * eps
    # Row by row, against a plain forward of HF.
    place = 0
    for step, request in zip(golden.recording.steps, golden.requests, strict=True):
        truth = step.tap("lm_head").double()
        call = {"input_ids": torch.tensor([request.token_ids]), "use_cache": False, "logits_to_keep": len(truth)}
        with torch.no_grad():
            error = decoder.model(**call).logits[0].double() - truth
        own = slice(place, place + len(truth))
        torch.testing.assert_close(noise["lm_head"][own], error.norm(dim=1) / truth.norm(dim=1))
        torch.testing.assert_close(noise[LOGIT_NOISE][own], error.abs().amax(dim=1))
        place += len(truth)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, "F64"),
        (torch.bfloat16, "F32"),
        (torch.float16, "F32"),
    ],
)
def test_the_truth_is_kept_finer_than_the_engine_computes_and_no_wider(load, tmp_path, dtype, kept):
    assert record_dtype(dtype) == {"F64": torch.float64, "F32": torch.float32}[kept]
    golden = make_golden(load("llama-tiny", dtype), PROMPTS, tmp_path / "golden")
    assert {entry.dtype for entry in golden.recording.manifest.taps} == {kept}


def test_making_one_leaves_nothing_behind(decoder, tmp_path):
    before, weights = surroundings(decoder), bits(decoder.model)
    make_golden(decoder, PROMPTS, tmp_path / "golden")
    assert surroundings(decoder) == before
    assert bits(decoder.model) == weights


def test_a_golden_is_made_once(load, cache, making):
    first = cached_golden(load("llama-tiny"), PROMPTS)
    second = cached_golden(load("llama-tiny"), PROMPTS)
    assert len(making) == 1
    assert first.recording.path == second.recording.path
    assert [path.name for path in cache.iterdir()] == [golden_key(load("llama-tiny"), PROMPTS)], (
        "and nothing besides it"
    )


def test_the_key_follows_the_prompts_and_the_dtype(load):
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
    keys += [golden_key(load("qwen2-tiny"), PROMPTS)]
    assert len(set(keys)) == len(keys)
    assert golden_key(load("llama-tiny"), PROMPTS) == keys[0]


def test_the_key_follows_config_and_weights(own_checkpoint, cache):
    decoder = load_decoder(own_checkpoint, dtype=torch.float32)
    keys = [golden_key(decoder, PROMPTS)]
    config = own_checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 2e-5}))
    keys.append(golden_key(decoder, PROMPTS))
    weights = own_checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    keys.append(golden_key(decoder, PROMPTS))
    assert len(set(keys)) == 3


def test_the_key_does_not_follow_the_folders_name(own_checkpoint, load):
    decoder = load_decoder(own_checkpoint, dtype=torch.float32)
    assert golden_key(decoder, PROMPTS) == golden_key(load("llama-tiny"), PROMPTS)


def truncate(folder):
    path = folder / "step-00001.safetensors"
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


def flip_a_bit(folder):
    path = folder / "step-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def remove_noise(folder):
    (folder / NOISE_FILE).unlink()


def truncate_noise(folder):
    path = folder / NOISE_FILE
    path.write_bytes(path.read_bytes()[:-9])


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
    ],
)
def test_a_damaged_golden_is_made_again(load, cache, making, damage):
    decoder = load("llama-tiny")
    whole = cached_golden(decoder, PROMPTS)
    logits = whole.recording.steps[0].tap("lm_head").clone()
    whole.recording.close()
    damage(whole.recording.path)
    again = cached_golden(decoder, PROMPTS)
    assert len(making) == 2
    assert torch.equal(again.recording.steps[0].tap("lm_head"), logits)
    assert LOGIT_NOISE in again.noise
    assert len(list(cache.iterdir())) == 1
    again.recording.close()


def test_an_altered_golden_is_never_used(load, cache, tmp_path, monkeypatch):
    """Either it is made again, or the comparison says so: nothing is ever judged by an altered truth."""
    decoder = load("llama-tiny")
    whole = cached_golden(decoder, PROMPTS)
    whole.recording.close()
    sound = make_golden(decoder, PROMPTS, tmp_path / "sound")
    flip_a_bit(whole.recording.path)
    check_digest = reader._check_digest

    def slowly(*args):  # a large file's digest comes later than the comparison's own look at it
        time.sleep(1)
        check_digest(*args)

    monkeypatch.setattr(reader, "_check_digest", slowly)
    again = cached_golden(decoder, PROMPTS)
    try:
        result = compare_run(sound.recording, again.recording, noise=again.noise)
    except HarnessError as error:
        assert error.code is Code.STEP_ALTERED  # noqa: PT017
    else:
        assert max(tap.max_abs for tap in result.taps) == 0


def test_two_that_make_the_same_golden_at_once_both_get_it(load, cache, making, monkeypatch):
    """Both find nothing, both make it; the rename of the second finds the first one's in place."""
    decoder, both_made = load("llama-tiny"), threading.Barrier(2)
    lock, make = threading.Lock(), golden_module._make

    def made_together(*args, **kwargs):
        with lock:  # two threads would share HF's registry of attention functions; two processes do not
            make(*args, **kwargs)
        both_made.wait(timeout=60)

    monkeypatch.setattr(golden_module, "_make", made_together)
    goldens, errors = [], []

    def get():
        try:
            goldens.append(cached_golden(decoder, PROMPTS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    assert len(making) == 2
    assert torch.equal(*(golden.recording.steps[0].tap("lm_head") for golden in goldens))
    assert len(list(cache.iterdir())) == 1


def test_a_golden_that_cannot_be_made_leaves_nothing(load, cache):
    long = Prompt(token_ids=tuple([7] * 512), max_new_tokens=1)
    with pytest.raises(HarnessError):
        cached_golden(load("llama-tiny"), [long])
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


def test_progress_is_told(load, tmp_path):
    said = []
    make_golden(load("llama-tiny"), PROMPTS, tmp_path / "golden", progress=lambda *args: said.append(args))
    assert [label for label, _, _ in said] == ["continuation"] * 2 + ["truth"] * 2 + ["noise"] * 2 + ["golden"]
    assert said[-1] == ("golden", 2, 2)
