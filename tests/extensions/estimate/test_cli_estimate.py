"""`harness estimate` in every form."""

import json

import pytest

from harness.cli.main import run

COMMAND = ["estimate", "--model", "qwen3-tiny", "--gpu", "h100", "--requests", "2", "--context", "16"]


def test_the_forms_say_the_same(capsys):
    assert run([*COMMAND, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (gpu,) = document["gpus"]
    assert (document["kind"], document["num_requests"], gpu["gpu"], gpu["fits"]) == ("estimate", 2, "H100-SXM", True)
    for form in ("human", "markdown"):
        assert run([*COMMAND, "--format", form]) == 0
        shown = capsys.readouterr().out
        assert f"{document['size']['num_parameters']:,} parameters" in shown
        assert f"{gpu['decode_step_s'] * 1e3:,.3f}" in shown


def test_a_dtype_has_its_short_name_too(capsys):
    assert run([*COMMAND, "--dtype", "bf16", "--cache-dtype", "fp8"]) == 0
    assert "weights in bfloat16, cache in float8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int3"], "no size is known"),
        (["--gpu", "X"], "no figures are known"),
        (["--requests", "0"], "requests"),
    ],
)
def test_what_it_does_not_know_is_bad_input(capsys, options, words):
    assert run([*COMMAND, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_profile_stands_beside_the_best_that_a_gpu_could_do(tmp_path, capsys):
    """A decode step of two requests that have 16 tokens is the estimate's own; a prompt in two chunks is the prompt."""
    steps = {
        "prefill": [([16], [16], 1)],
        "chunked": [([10], [10], 0), ([6], [16], 1)],
        "decode": [([1, 1], [16, 16], 2)],
    }
    phases = [
        {
            "name": name, "wall_ms": 3.0,
            "steps": [
                {"phase": name, "query_lens": rows, "context_lens": contexts, "num_sampled": sampled}
                for rows, contexts, sampled in step
            ],
        }
        for name, step in steps.items()
    ]  # fmt: skip
    written = {"engine": "hf", "model": "qwen3-tiny", "dtype": "bfloat16", "device": "cpu", "phases": phases}
    (tmp_path / "profile.json").write_text(json.dumps(written))
    assert run([*COMMAND, "--profile", str(tmp_path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (gpu,), measured = document["gpus"], {phase["name"]: phase for phase in document["measured"]["phases"]}
    assert measured["decode"]["measured_s"] == 0.003
    assert measured["decode"]["best_s"] == [pytest.approx(gpu["decode_step_s"])]
    assert measured["prefill"]["best_s"] == [pytest.approx(gpu["prefill_s"], rel=0.01)]
    assert measured["chunked"]["best_s"][0] > measured["prefill"]["best_s"][0]  # the weights are read twice
    assert run([*COMMAND, "--profile", str(tmp_path)]) == 0
    assert "measured: hf on cpu, qwen3-tiny in bfloat16:" in capsys.readouterr().out


STEP = (
    '"engine": "hf", "model": "m", "dtype": "d", "device": "cpu", "phases": [{"name": "decode", "wall_ms": 1, "steps": '
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "content",
    [
        None, "{}", '{"phases": 3}',
        f'{{{STEP}[{{"phase": "decode", "num_sampled": 1, "query_lens": [5], "context_lens": [2]}}]}}]}}',
        f'{{{STEP}[{{"phase": "decode", "num_sampled": 1, "query_lens": [1, 1], "context_lens": [2]}}]}}]}}',
    ],
)  # fmt: skip
def test_a_folder_without_a_profile_is_bad_input(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    assert run([*COMMAND, "--profile", str(tmp_path)]) == 2
    assert "H079" in capsys.readouterr().err


def test_the_cache_is_told_by_how_it_grows(capsys):
    asked = ["estimate", "--model", "gemma3-tiny", "--context", "64", "--block-size", "8", "--format", "json"]
    assert run(asked) == 0
    size = json.loads(capsys.readouterr().out)["size"]
    parts = {part["name"]: part["num_bytes"] for part in size["cache_parts"]}
    assert set(parts) == {"every token", "window"}
    assert sum(parts.values()) == size["cache_bytes"]
    assert parts["every token"] == 64 * size["cache_bytes_per_token"]
    assert size["num_blocks"] == 8
