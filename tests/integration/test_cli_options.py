"""The names of commands and options: what scripts rely on changes here first."""

import re
from importlib.util import find_spec
from inspect import signature

import pytest

from harness import __version__
from harness.cli.main import wants_json
from harness.command import forms
from harness.command.options import EVERY_OPTION
from harness.plan import plan_request

from .command_tree import leaves, parameters, with_an_empty_value

OPTIONS = {
    "check": (
        "--model --hf --tensors --names --engine --engine-option --engine-timeout --engine-python --device --prompt "
        "--prompt-file --token-ids --max-new-tokens --schedule --taps --case --lora --mtp --budget "
        "--explain-seconds --rows --dtype --out --dry-run --local-files-only --format"
    ),
    "golden": (
        "--model --hf --dtype --device --truth --prompt --prompt-file --token-ids --max-new-tokens --continuation "
        "--case --lora --mtp --out --local-files-only --format"
    ),
    "record": (
        "--out --golden --model --engine --engine-option --engine-timeout --engine-python --dtype --device "
        "--truth --prompt --prompt-file --token-ids --max-new-tokens --lora --mtp --case --schedule "
        "--local-files-only --format"
    ),
    "diff": (
        "expected actual --model --lora --device --truth --taps --lacking --require --close --local-files-only --format"
    ),
    "inspect": (
        "path beside --tensor --row --slice --against --before --map --modules --model --hf --engine --engine-option "
        "--engine-timeout --engine-python --dtype --device --mtp --local-files-only --format"
    ),
    "new-adapter": "name --out",
    "profile": (
        "--out --model --engine --engine-option --dtype --device --lora --prompt --prompt-file --token-ids --case "
        "--requests --prompt-tokens --max-new-tokens --batch-size --phase --wait --warmup --active --repeat "
        "--runs --quick --local-files-only --format"
    ),
    "gate": (
        "profile baseline --accept --against --against-repo --against-package --blocks --seconds --tolerance --format"
    ),
}
"""Options and arguments of each command, in the order of its help."""
FORMATS = {
    "check": ["human", "markdown", "json", "github", "sarif"],
    "golden": ["human", "json"],
    "record": ["human", "json"],
    "diff": ["human", "markdown", "json", "github", "sarif"],
    "inspect": ["human", "json"],
    "profile": ["human", "json"],
    "gate": ["human", "json", "github", "sarif"],
}


def test_the_commands_are_those_that_were_promised():
    assert list(leaves(frozenset(OPTIONS))) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_promised(name):
    assert parameters(leaves(frozenset({name}))[name]) == OPTIONS[name].split()


def test_a_check_has_at_most_26_options():
    assert len(OPTIONS["check"].split()) <= 26


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_are_those_that_were_promised(harness, name):
    (choices,) = re.findall(r"--format\s+[<\[]([a-z|]+)", harness(name, "--help").out)
    assert [form for form in choices.split("|") if form in FORMATS[name]] == FORMATS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_that_a_result_lacks_is_refused(harness, name):
    ran = harness(name, *(["."] * {"diff": 2, "inspect": 1}.get(name, 0)), "--format", "xml")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("H013: this result has no form 'xml'\n")
    assert "human, " in ran.err
    assert "json" in ran.err


@pytest.mark.parametrize(
    "of_result",
    [var for var in vars(forms).values() if isinstance(var, forms.Forms)],
    ids=lambda of_result: of_result.functions["json"],
)
def test_every_form_that_is_offered_can_be_made(of_result):
    for form in of_result.functions:
        assert signature(of_result.function(form)).parameters


def test_version(harness):
    ran = harness("--version")
    assert (ran.status, ran.err) == (0, "")
    assert re.fullmatch(rf"harness {re.escape(__version__)}(, commit \w+(-dirty)?)?", ran.out.strip())


def test_help(harness):
    ran = harness("--help")
    assert ran.status == 0
    assert all(f"\n  {name} " in ran.out for name in OPTIONS)
    assert "5  nothing was checked" in ran.out
    assert "HARNESS_CACHE" in ran.out


@pytest.mark.parametrize("name", OPTIONS)
def test_help_of_a_command_explains_every_option(harness, name):
    ran = harness(name, "--help")
    assert ran.status == 0
    assert all(option in ran.out for option in OPTIONS[name].split() if option.startswith("--"))
    command = leaves(frozenset({name}))[name]
    assert all(parameter.help for parameter in command.params if parameter.opts[0] != "--help")


def test_help_names_the_installed_engines(harness, install):
    install("", name="mine")
    libraries = {"llamacpp": "llama_cpp", "mlx": "mlx_lm", "onnxruntime": "onnxruntime_genai", "openvino": "openvino"}
    there = [name for name, library in {**libraries, "vllm": "vllm"}.items() if find_spec(library) is not None]
    expected = f"Engines installed here: {', '.join(sorted([*there, 'hf', 'mine', 'reference']))}."
    for name in ("check", "record"):
        assert expected in " ".join(harness(name, "--help").out.split())


def test_no_command_shows_the_help_and_fails(harness):
    ran = harness()
    assert (ran.status, ran.out) == (2, "")
    assert "Usage: harness" in ran.err


def test_an_unknown_command(harness):
    ran = harness("chekc")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("H013: No such command 'chekc'")
    assert "try:      harness --help" in ran.err


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_given_empty_is_an_error(harness, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)  # which an empty path would name
    for arguments in with_an_empty_value(leaves(frozenset({name}))[name]):
        ran = harness(name, *arguments)
        assert ran.status == 2
        option = arguments[-2] if len(arguments) == 2 else "[A-Z]+"
        assert re.match(rf"H013: {option} is given empty\n", ran.err), ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_value_in_front_of_another_is_an_error_as_well(harness, golden, recording):
    assert harness("diff", golden, recording, "--taps", "", "--taps", "*").err.startswith("H013: --taps is given empty")


def test_an_engine_option_without_a_value(harness):
    assert harness("check", "--engine-option", "block_size=").err.startswith("H013: an engine option is NAME=VALUE")


def test_json_is_recognised_only_as_the_format():
    assert wants_json(["check", "--format", "json"])
    assert wants_json(["check", "--format=json", "--nope"])
    assert not wants_json(["check", "--format", "human", "--prompt", "json"])


@pytest.mark.parametrize(
    ("in_case", "option", "expected"),
    [
        ("engine_timeout_s = 5.0", 0.0, (False, None)),
        ("isolate = false", 7.0, (None, 7.0)),
        ("isolate = true", 0.0, (False, None)),
        ("engine_timeout_s = 5.0", 7.0, (None, 7.0)),
    ],
)
def test_a_time_limit_overrides_what_a_case_says_of_the_engines_process(tmp_path, in_case, option, expected):
    case = tmp_path / "case.toml"
    case.write_text(f'schema_version = 1\nmodel = "qwen3-tiny"\n{in_case}\n[[requests]]\ntoken_ids = [1, 2]\n')
    fields = EVERY_OPTION.gather({"case": case, "engine_timeout_s": option})
    planned = plan_request(**fields).case
    assert (planned.isolate, planned.engine_timeout_s) == expected
