"""`harness golden`, `harness record` and `harness diff`: the check in three steps, by hand."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch

from harness.errors import Code
from harness.formats.recording import Recording

from ..recording_writer import new_writer, requests_of
from ..unit.tiny_models import save, tiny_model
from .commands import rewrite
from .test_cli_check import DIVERGENCE_KEYS, KEYS, TAP_KEYS

TAP = "model.layers.1.mlp.up_proj"


def test_golden_says_what_it_made(harness, llama, workload, tmp_path):
    out = tmp_path / "new" / "golden"
    ran = harness("golden", "--model", llama, *workload, "--out", out, "--format", "json")
    assert ran.status == 0
    sizes = [path.stat().st_size for path in out.glob("step-*")]
    assert ran.json == {
        "schema_version": 1, "golden": str(out), "model": str(llama), "dtype": "float32", "num_requests": 2,
        "truth": "float64", "num_rows": 13, "num_taps": 48, "num_bytes": sum(sizes),
    }  # fmt: skip
    with Recording.open(out) as recording:
        assert recording.manifest.schedule == "oracle"
        assert [request.prompt_length for request in recording.manifest.requests] == [6, 3]


def test_golden_without_a_folder_is_in_the_cache_where_check_finds_it(harness, llama, workload, monkeypatch, tmp_path):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    ran = harness("golden", "--model", llama, *workload)
    assert ran.status == 0
    folder, summary = ran.out.split(": ", 1)
    assert Path(folder).parent == tmp_path / "goldens"
    assert summary.startswith("2 requests, 13 rows, 48 taps")
    assert harness("check", "--model", llama, *workload, "--schedule", "plain").status == 0
    assert [path.name for path in (tmp_path / "goldens").iterdir()] == [Path(folder).name]


def test_a_golden_along_given_tokens(harness, llama, tmp_path):
    """The truth is that of the tokens given; a golden along HF's own tokens is the one that HF continues itself."""
    continued, same, changed = tmp_path / "own", tmp_path / "same", tmp_path / "other"
    ids = ["--model", llama, "--token-ids", "1,20,21"]
    assert harness("golden", *ids, "--max-new-tokens", 5, "--out", continued).status == 0
    with Recording.open(continued) as recording:
        (request,) = recording.manifest.requests
    continuation = request.token_ids[3:]
    for out, tokens in ((same, continuation), (changed, [9, *continuation[1:]])):
        assert harness("golden", *ids, "--continuation", ",".join(map(str, tokens)), "--out", out).status == 0
        with Recording.open(out) as recording:
            (made,) = recording.manifest.requests
            assert (made.token_ids[3:], made.prompt_length) == (tokens, 3)
    rows = [safetensors.torch.load_file(folder / "step-00000.safetensors") for folder in (continued, same, changed)]
    assert rows[0]["lm_head"].equal(rows[1]["lm_head"])
    assert rows[0]["lm_head"][0].allclose(rows[2]["lm_head"][0])
    assert not rows[0]["lm_head"][1].allclose(rows[2]["lm_head"][1], atol=1e-3)
    assert harness("record", "--golden", changed, "--out", tmp_path / "r").status == 0
    assert harness("diff", changed, tmp_path / "r", "--model", llama).status == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--continuation", "1", "--continuation", "2"], "each request needs its continuation"),
        (
            ["--continuation", "1", "--max-new-tokens", 3],
            "the length of the continuation sets the number of new tokens",
        ),
        (["--continuation", ""], "--continuation is given empty"),
        (["--continuation", "x"], "token ids must be integers"),
        (["--continuation", "99999"], "token id 99999 is outside the vocabulary"),
    ],
)
def test_a_continuation_that_makes_no_sense(harness, llama, options, said):
    ran = harness("golden", "--model", llama, "--token-ids", "1,2", *options)
    assert ran.status == 2
    assert said in ran.err


def test_run_records_what_a_golden_says(harness, golden, tmp_path):
    ran = harness("record", "--golden", golden, "--engine", "hf", "--schedule", "batched", "--out", tmp_path / "r")
    assert ran.status == 0
    assert ran.out.startswith(f"{tmp_path / 'r'}: ")
    with Recording.open(tmp_path / "r") as ours, Recording.open(golden) as theirs:
        assert ours.manifest.requests == theirs.manifest.requests
        assert (ours.manifest.schedule, ours.manifest.producer.name) == ("batched", "harness.engines.hf")


def test_a_golden_says_nothing_of_the_process_of_the_engine(harness, golden, tmp_path):
    ran = harness("record", "--golden", golden, "--engine-timeout", "0", "--out", tmp_path / "r")
    assert ran.status == 0, ran.err


def test_run_without_a_golden_finds_the_tokens_itself(harness, golden, llama, workload, tmp_path):
    options = ["--schedule", "chunked:4", "--engine-option", "block_size=2", "--format", "json"]
    ran = harness("record", "--model", llama, *workload, *options, "--out", tmp_path / "r")
    assert ran.status == 0
    summary = ran.json
    assert (summary["schedule"], summary["num_rows"], summary["engine"]) == ("chunked:4", 13, "reference")
    assert harness("diff", golden, tmp_path / "r", "--require", "chunked_prefill").status == 0


def test_the_keys_of_diff(harness, golden, recording, llama):
    for options in ([], ["--model", llama]):
        ran = harness("diff", golden, recording, *options, "--format", "json")
        assert ran.status == 0
        document = ran.json
        assert list(document)[: len(KEYS)] == KEYS
        assert (document["verdict"], document["schedules"]) == ("pass", ["batched"])
        assert document["tokens"] == {"compared": 6, "equal": 6, "ties": 0}
        assert document["timings_s"]["golden"] is None
        assert document["notes"] == []
        assert all(set(tap) >= TAP_KEYS for tap in document["taps"])
        judged = {tap["judged_by"] for tap in document["taps"]}
        assert judged == ({"local", "cache"} if options else {"propagated", "cache"})


def test_the_keys_of_diff_for_other_numbers(harness, golden, llama, workload, tmp_path):
    assert harness("record", "--model", llama, *workload, "--dtype", "bfloat16", "--out", tmp_path / "r").status == 0
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    (tmp_path / "r" / "manifest.json").write_text(json.dumps({**manifest, "dtype": "float32"}))
    ran = harness("diff", golden, tmp_path / "r", "--format", "json")
    assert ran.status == 1
    assert ran.json["verdict"] == "mismatch"
    assert {finding["code"] for finding in ran.json["findings"]} >= {Code.TAP_MISMATCH}
    assert ran.json["first_divergence"] is None or set(ran.json["first_divergence"]) >= DIVERGENCE_KEYS


def test_a_tap_that_was_not_recorded_fails_unless_it_was_not_asked_for(harness, golden, recording, tmp_path):
    folder = Path(shutil.copytree(recording, tmp_path / "narrower"))
    for step, path in enumerate(sorted(folder.glob("step-*"))):
        if TAP in safetensors.torch.load(path.read_bytes()):
            rewrite(folder, lambda tensors: tensors.pop(TAP), step=step)
    ran = harness("diff", golden, folder, "--format", "json")
    assert ran.status == 1
    assert [(finding["code"], finding["tap"]) for finding in ran.json["findings"]] == [(Code.TAP_MISSING, TAP)]
    assert ran.json["coverage"]["missing"] == 13
    assert ran.json["coverage"]["missing_taps"] == [TAP]
    assert harness("diff", golden, folder, "--taps", "model.layers.*.output", "--taps", "lm_head").status == 0
    assert harness("diff", golden, folder, "--taps", "all").status == 1
    for preset in ("cache", "logits", "tokens"):  # as `harness check --taps` has them
        assert harness("diff", golden, folder, "--taps", preset).status == 0


def test_other_weights_than_those_that_were_recorded_are_noted(
    harness, golden, recording, checkpoints, tmp_path, llama
):
    folder = Path(shutil.copytree(llama, tmp_path / "other"))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(weights))
    ran = harness("diff", golden, recording, "--model", folder, "--format", "json")
    (note,) = ran.json["notes"]
    assert "other weights" in note


def record_nothing(folder: Path) -> None:
    with new_writer(folder, requests_of({0: [5, 7, 9]}, prompt_length=2)) as writer:
        writer.begin_step(phase="prefill", request=[0, 0], position=[0, 1])
        writer.end_step()
        writer.begin_step(phase="decode", request=[0], position=[2])
        writer.end_step()


def test_recordings_without_taps_and_tokens_check_nothing(harness, tmp_path):
    record_nothing(tmp_path / "a")
    record_nothing(tmp_path / "b")
    ran = harness("diff", tmp_path / "a", tmp_path / "b", "--format", "json")
    assert ran.status == 5, ran.err
    assert ran.json["verdict"] == "nothing"
    assert harness("diff", tmp_path / "a", tmp_path / "b").status == 5


@pytest.mark.parametrize("form", ["markdown", "human"])
def test_diff_in_words(harness, golden, recording, form):
    ran = harness("diff", golden, recording, "--format", form)
    assert ran.status == 0
    assert "6 of 6" in ran.out


def without_read_back(folder: Path, *, keep_taps: bool = True) -> Path:
    """Remove the steps that read the cache back, and put the manifest right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    kept = [step for step in manifest["steps"] if step["phase"] != "readback"]
    assert len(kept) < len(manifest["steps"])
    manifest["steps"] = [{**step, "index": index} for index, step in enumerate(kept)]
    if not keep_taps:
        manifest["taps"] = [tap for tap in manifest["taps"] if not tap["name"].endswith("_cache")]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("keep_taps", [True, False])
@pytest.mark.parametrize("with_model", [True, False])
def test_a_read_back_that_was_removed_is_missed(harness, golden, recording, llama, tmp_path, with_model, keep_taps):
    """Slots and block tables say that there was a cache."""
    folder = without_read_back(Path(shutil.copytree(recording, tmp_path / "r")), keep_taps=keep_taps)
    arguments = ["diff", golden, folder, *(["--model", llama] if with_model else []), "--format", "json"]
    ran = harness(*arguments)
    assert ran.status == 1
    assert {finding["code"] for finding in ran.json["findings"]} == {Code.TAP_MISSING}
    caches = [f"model.layers.{layer}.{site}" for layer in range(3) for site in ("k_cache", "v_cache")]
    assert ran.json["coverage"]["missing_taps"] == caches
    assert harness(*arguments, "--taps", "cache").json["coverage"]["missing_taps"] == caches
    declared = harness(*arguments, "--lacking", "k_cache", "--lacking", "v_cache")
    assert declared.status == 0
    assert declared.json["coverage"]["not_offered"] == ["k_cache", "v_cache"]


def test_an_engine_of_which_nobody_knows_whether_it_has_a_cache(harness, golden, install, tmp_path):
    """No slots, no block tables and no read-back: it passes, and the result says what was not seen."""
    recording = tmp_path / "r"
    arguments = ["--engine", "hf", "--out", recording]
    assert harness("record", "--golden", golden, *arguments).status == 0
    without_read_back(recording, keep_taps=False)
    ran = harness("diff", golden, recording, "--format", "json")
    assert ran.status == 0
    assert ran.json["notes"] == ["no KV cache was read back: whether it holds what was written is not known"]


def test_an_unknown_site_is_not_lacking(harness, golden, recording):
    ran = harness("diff", golden, recording, "--lacking", "k_cahce")
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_OPTION)
    assert "k_cache" in ran.err


@pytest.mark.parametrize("side", ["golden", "recording"])
def test_the_part_of_one_rank_is_not_compared_as_if_it_were_whole(harness, golden, recording, tmp_path, side):
    folders = {"golden": golden, "recording": recording}
    folders[side] = Path(shutil.copytree(folders[side], tmp_path / "part"))
    manifest = json.loads((folders[side] / "manifest.json").read_text())
    (folders[side] / "manifest.json").write_text(json.dumps(manifest | {"rank": 1, "world_size": 2}))
    (folders[side] / "golden.json").unlink(missing_ok=True)
    ran = harness("diff", *folders.values(), "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, Code.ONE_RANK_OF_SEVERAL)
    assert ran.json["error"]["actual"] == "rank 1 of 2"


def test_taps_that_every_rank_has_whole_are_compared(harness, golden, recording, tmp_path):
    folder = Path(shutil.copytree(recording, tmp_path / "part"))
    manifest = json.loads((folder / "manifest.json").read_text())
    taps = [{**tap, "shard": {"mode": "replicated"}} for tap in manifest["taps"]]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"rank": 1, "world_size": 2, "taps": taps}))
    assert harness("diff", golden, folder).status == 0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("qwen3-tiny", "float32"), ("qwen3-moe-tiny", "bfloat16")])
def test_two_sound_engines_differ_by_rounding_alone(harness, tmp_path, model, dtype):
    """No golden says how far rounding carries, and no graph which taps are choices."""
    ids = ",".join(str(3 + at * at % 190) for at in range(90))
    for backend in ("contiguous", "recompute"):
        asked = ["--model", model, "--dtype", dtype, "--token-ids", ids, "--max-new-tokens", 20]
        ran = harness("record", *asked, "--engine-option", f"attention_backend={backend}", "--out", tmp_path / backend)
        assert ran.status == 0
    lacking = ["--lacking", "k_cache", "--lacking", "v_cache"]
    ran = harness("diff", tmp_path / "contiguous", tmp_path / "recompute", *lacking)
    assert ran.status == 0
    assert "EXPECTED has no error of HF's own" in " ".join(ran.out.split())


def test_states_are_compared_without_a_model_where_they_were_read(harness, tmp_path):
    """They are no rows of a forward: a step that did not read them lacks nothing."""
    model, first, copy = tmp_path / "mamba", tmp_path / "first", tmp_path / "other"
    save(tiny_model("mamba"), model)
    ids = ["--model", model, "--engine", "hf", "--token-ids", "1,2,3,4", "--max-new-tokens", 2, "--dtype", "float32"]
    assert harness("record", *ids, "--out", first).status == 0
    shutil.copytree(first, copy)
    assert harness("diff", first, copy).status == 0

    with Recording.open(copy) as recording:
        read = next(step.index for step in recording.steps if step.phase == "readback")
    state = "backbone.layers.1.recurrent_state"
    rewrite(copy, lambda tensors: tensors[state].mul_(1.05), step=read)
    ran = harness("diff", first, copy, "--format", "json")
    assert ran.status == 1
    assert ran.json["runs"][0]["first_divergence"]["tap"] == state
