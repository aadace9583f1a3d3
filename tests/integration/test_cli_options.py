"""The names of commands and options: what scripts rely on changes here first."""

import re
from importlib.util import find_spec
from inspect import signature

import pytest
import typer

from harness import __version__
from harness.cli.main import build_app, wants_json
from harness.command import forms
from harness.formats.case import Case

ENGINE = ["--engine", "--engine-option", "--isolate", "--engine-timeout", "--engine-python"]
WORKLOAD = ["--device", "--truth", "--prompt", "--prompt-file", "--chat", "--token-ids",
            "--max-new-tokens"]  # fmt: skip
OPTIONS = {
    "check": ["--model", "--hf", "--tensors", *ENGINE, *WORKLOAD, "--schedule", "--taps", "--case", "--lora",
              "--other-lora", "--stop-early", "--budget", "--rows", "--rows-seed", "--dtype", "--out", "--fault",
              "--profile", "--estimate", "--endpoint", "--served-model", "--concurrency", "--request-timeout",
              "--again", "--local-files-only", "--format"],
    "golden": ["--model", "--hf", "--dtype", *WORKLOAD, "--continuation", "--case", "--lora", "--out",
               "--local-files-only", "--format"],
    "run": ["--out", "--golden", "--model", *ENGINE, "--dtype", *WORKLOAD, "--lora", "--case", "--schedule",
            "--local-files-only", "--format"],
    "diff": ["expected", "actual", "--model", "--lora", "--device", "--truth", "--taps", "--lacking", "--require",
             "--local-files-only", "--format"],
    "inspect": ["path", "beside", "--tensor", "--row", "--slice", "--model", "--hf", *ENGINE, "--dtype", "--device",
                "--local-files-only", "--format"],
    "map": ["--model", *ENGINE, "--dtype", "--device", "--against", "--local-files-only", "--format"],
    "sampler": ["--endpoint", "--served-model", "--concurrency", "--request-timeout", "--model", "--device", "--truth",
                "--dtype", "--draws", "--seed", "--order", "--only", "--local-files-only", "--format"],
    "audit": ["--endpoint", "--served-model", "--concurrency", "--request-timeout", "--model", "--device", "--truth",
              "--hypotheses", "--dtype", "--tokens", "--ask", "--seed", "--local-files-only", "--format"],
    "tokens": ["--endpoint", "--served-model", "--concurrency", "--request-timeout", "--model", "--conversations",
               "--seed", "--local-files-only", "--format"],
    "load": ["--endpoint", "--served-model", "--concurrency", "--request-timeout", "--model", "--device", "--truth",
             "--dtype", "--num-requests", "--prompt-tokens", "--new-tokens", "--requests", "--rate", "--burst",
             "--limit", "--at-least", "--judged", "--seed", "--local-files-only", "--format"],
    "profile": ["--out", "--model", "--engine", "--engine-option", "--dtype", "--device", "--lora", "--prompt",
                "--prompt-file", "--chat", "--token-ids", "--case", "--requests", "--prompt-tokens",
                "--max-new-tokens", "--batch-size", "--phase", "--wait", "--warmup", "--active", "--repeat", "--runs",
                "--quick", "--local-files-only", "--format"],
    "gate": ["profile", "baseline", "--accept", "--against", "--against-repo", "--against-package", "--blocks",
             "--seconds", "--tolerance", "--format"],
    "fuzz": ["--model", "--engine", "--engine-option", "--dtype", "--device", "--truth", "--seconds", "--seed",
             "--first", "--workload-seconds", "--out", "--replay", "--invariance", "--poison", "--fault",
             "--local-files-only", "--format"],
    "faults": ["--only", "--category", "--seeds", "--format"],
    "quant": ["--model", "--types", "--file", "--caches", "--engine-option", "--text-file", "--tokens", "--sequences",
              "--seed", "--pad", "--parts", "--out", "--local-files-only", "--format"],
    "estimate": ["--model", "--gpu", "--dtype", "--cache-dtype", "--requests", "--context", "--block-size", "--profile",
                 "--format"],
    "rollout": ["rollouts", "--model", "--trainer", "--layout", "--engine", "--engine-option", "--previous",
                "--engine-weights", "--head", "--weight-version", "--rows", "--dtype", "--device", "--truth",
                "--local-files-only", "--history", "--out", "--format"],
    "weights": ["first", "second", "--before", "--local-files-only", "--format"],
    "new-adapter": ["name", "--out"],
    "bench": [],  # a group
    "suite": [],  # a group
    "trace": [],  # a group
    "memory": [],  # a group
}  # fmt: skip
FORMATS = {
    "check": ["human", "markdown", "json"],
    "golden": ["human", "json"],
    "run": ["human", "json"],
    "diff": ["human", "markdown", "json"],
    "inspect": ["human", "json"],
    "map": ["human", "json"],
    "profile": ["human", "json"],
    "fuzz": ["human", "json"],
    "faults": ["human", "markdown", "json"],
    "quant": ["human", "markdown", "json"],
    "estimate": ["human", "markdown", "json"],
    "rollout": ["human", "markdown", "json"],
    "weights": ["human", "markdown", "json"],
    "sampler": ["human", "markdown", "json"],
    "audit": ["human", "markdown", "json"],
    "load": ["human", "markdown", "json"],
    "tokens": ["human", "markdown", "json"],
}


def commands():
    return typer.main.get_command(build_app()).commands


def test_the_commands_are_those_that_were_promised():
    assert list(commands()) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_promised(name):
    """An option that is not promised here is one that a case declares: no command adds another in silence."""
    declared = {option.name.partition("/")[0] for option in Case.options().values()} - set(OPTIONS[name])
    offered = [parameter.opts[0] for parameter in commands()[name].params]
    assert [option for option in offered if option not in declared] == OPTIONS[name]


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
    ids=lambda each: each.functions["json"],
)
def test_every_form_that_is_offered_can_be_made(of_result):
    for form in of_result.functions:
        assert signature(of_result.function(form)).parameters


def test_a_server_is_refused_a_form_that_only_other_checks_have(harness, monkeypatch):
    monkeypatch.setitem(forms.CHECKS.functions, "xml", "nowhere:at_all")
    ran = harness("check", "--endpoint", "http://127.0.0.1:9", "--format", "xml")
    assert ran.status == 2
    assert ran.err.startswith(
        "H013: this result has no form 'xml'\n  where:    --format\n  expected: human, markdown, json"
    )


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
    assert all(option in ran.out for option in OPTIONS[name] if option.startswith("--"))
    assert all(parameter.help for parameter in commands()[name].params if parameter.opts[0] != "--help")


def test_help_names_the_installed_engines(harness, install):
    install("", name="mine")
    libraries = {"llamacpp": "llama_cpp", "mlx": "mlx_lm", "onnxruntime": "onnxruntime_genai", "openvino": "openvino"}
    there = [name for name, library in {**libraries, "vllm": "vllm"}.items() if find_spec(library) is not None]
    expected = f"Engines installed here: {', '.join(sorted([*there, 'hf', 'mine', 'reference']))}."
    for name in ("check", "run"):
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


def options_with_a_value():
    """Yield the arguments of every command with one of its options or arguments given empty."""
    root = typer.main.get_command(build_app())
    groups = [(("bench",), root.commands["bench"]), (("trace",), root.commands["trace"]), ((), root)]
    for path, group in groups:
        for name, command in group.commands.items():
            for parameter in command.params:
                is_flag = getattr(parameter, "is_flag", False)
                if not is_flag and parameter.name not in ("prompt", "token_ids"):  # EMPTY_PROMPT
                    given = [parameter.opts[0], ""] if parameter.opts[0].startswith("-") else [""]
                    yield [*path, name, *given]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("arguments", list(options_with_a_value()), ids=" ".join)
def test_an_option_given_empty_is_an_error(harness, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)  # which an empty path would name
    ran = harness(*arguments)
    assert ran.status == 2
    name = arguments[-2] if arguments[-2].startswith("--") else "[A-Z]+"
    assert re.match(rf"H013: {name} is given empty\n", ran.err), ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_value_in_front_of_another_is_an_error_as_well(harness, golden, recording):
    assert harness("diff", golden, recording, "--taps", "", "--taps", "*").err.startswith("H013: --taps is given empty")


def test_an_engine_option_without_a_value(harness):
    assert harness("check", "--engine-option", "block_size=").err.startswith("H013: an engine option is NAME=VALUE")


def test_json_is_recognised_only_as_the_format():
    assert wants_json(["check", "--format", "json"])
    assert wants_json(["check", "--format=json", "--nope"])
    assert not wants_json(["check", "--format", "human", "--prompt", "json"])
