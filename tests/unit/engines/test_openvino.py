"""OpenVINO under test, where it is installed; exports are made by `optimum-cli`, which may have another environment."""

import shutil
import subprocess

import pytest

import harness

pytest.importorskip("openvino", exc_type=ImportError)

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]


@pytest.fixture(scope="session")
def export(checkpoints, tmp_path_factory):
    program = shutil.which("optimum-cli")
    if program is None:
        pytest.skip("optimum-cli (optimum-intel) is not installed")
    folder = tmp_path_factory.mktemp("export")
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
    command = [program, "export", "openvino", "--model", checkpoints / "qwen3-tiny", *options, folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def check(checkpoints, export, **options):
    return harness.check(
        "openvino", model=checkpoints / "qwen3-tiny", prompts=PROMPTS, max_new_tokens=4,
        engine_options={"export": export}, **options,
    )  # fmt: skip


def test_every_operation_and_the_cache_pass(checkpoints, export):
    report = check(checkpoints, export, schedules=["plain", "chunked:3"])
    assert report, report.text()
    assert any("54 taps were found by content" in note for note in report.notes)
    assert any("KV_CACHE_PRECISION=f32" in note for note in report.notes)
    assert all(run.coverage.not_offered == () for run in report.runs)


def test_an_export_has_to_be_there(checkpoints, tmp_path):
    with pytest.raises(harness.HarnessError, match=r"(?s)which is not there.*optimum-cli export openvino"):
        check(checkpoints, tmp_path)


@pytest.mark.parametrize(("option", "value"), [("device", "cuda"), ("dtype", "bfloat16")])
def test_what_it_cannot_do_is_refused(checkpoints, tmp_path, option, value):
    from harness.engines.openvino import open_engine

    (tmp_path / "openvino_model.xml").touch()
    given = {"dtype": "float32", "device": "cpu", option: value}
    with pytest.raises(harness.HarnessError, match="on the CPU here, in float32"):
        open_engine(checkpoints / "qwen3-tiny", options={"export": str(tmp_path)}, **given)
