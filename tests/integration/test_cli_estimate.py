"""`harness estimate` in every form."""

import json

import pytest

from harness.cli.main import run

GIVEN = ["estimate", "--model", "qwen3-tiny", "--gpu", "h100", "--requests", "2", "--context", "16"]


def test_the_forms_say_the_same(capsys):
    assert run([*GIVEN, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (gpu,) = document["gpus"]
    assert (document["kind"], document["num_requests"], gpu["gpu"], gpu["fits"]) == ("estimate", 2, "H100-SXM", True)
    for form in ("human", "markdown"):
        assert run([*GIVEN, "--format", form]) == 0
        shown = capsys.readouterr().out
        assert f"{document['size']['num_parameters']:,} parameters" in shown
        assert f"{gpu['decode_step_s'] * 1e3:,.3f}" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int3"], "no size is known"),
        (["--gpu", "X"], "no figures are known"),
        (["--requests", "0"], "requests"),
    ],
)
def test_what_it_does_not_know_is_bad_input(capsys, options, words):
    assert run([*GIVEN, *options]) == 2
    assert words in capsys.readouterr().err
