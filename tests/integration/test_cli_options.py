"""The names of commands and options: what scripts rely on changes here first."""

import re

import pytest
import typer

from harness import __version__
from harness.cli.main import build_app, wants_json

WORKLOAD = ["--dtype", "--device", "--truth", "--prompt", "--prompt-file", "--token-ids", "--max-new-tokens"]
OPTIONS = {
    "check": ["--model", "--engine", "--engine-option", *WORKLOAD, "--schedule", "--case", "--out",
              "--fault", "--profile", "--local-files-only", "--format"],
    "golden": ["--model", *WORKLOAD, "--case", "--out", "--local-files-only", "--format"],
    "run": ["--out", "--golden", "--model", "--engine", "--engine-option", *WORKLOAD, "--schedule", "--case",
            "--local-files-only", "--format"],
    "diff": ["expected", "actual", "--model", "--device", "--truth", "--taps", "--require", "--local-files-only",
             "--format"],
    "inspect": ["path", "--format"],
    "generate": ["--prompt", "--model", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed",
                 "--device", "--dtype", "--engine-option", "--local-files-only", "--chat", "--stream", "--show-stats",
                 "--format"],
    "profile": ["--out", "--model", "--engine", "--engine-option", "--dtype", "--device", "--prompt-tokens",
                "--max-new-tokens", "--batch-size", "--phase", "--wait", "--warmup", "--active", "--repeat", "--runs",
                "--local-files-only", "--format"],
    "gate": ["profile", "baseline", "--accept", "--against", "--blocks", "--tolerance", "--format"],
    "fuzz": ["--model", "--engine", "--engine-option", "--dtype", "--device", "--truth", "--seconds", "--seed",
             "--first", "--workload-seconds", "--out", "--replay", "--fault", "--local-files-only", "--format"],
    "faults": ["--only", "--category", "--seeds", "--format"],
    "bench": [],  # a group
    "trace": [],  # a group
}  # fmt: skip
FORMATS = {
    "check": ["human", "markdown", "json"],
    "golden": ["human", "json"],
    "run": ["human", "json"],
    "diff": ["human", "markdown", "json"],
    "inspect": ["human", "json"],
    "generate": ["human", "json"],
    "profile": ["human", "json"],
    "fuzz": ["human", "json"],
    "faults": ["human", "markdown", "json"],
}


def commands():
    return typer.main.get_command(build_app()).commands


def test_the_commands_are_those_that_were_promised():
    assert list(commands()) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_promised(name):
    assert [parameter.opts[0] for parameter in commands()[name].params] == OPTIONS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_are_those_that_were_promised(harness, name):
    (choices,) = re.findall(r"--format\s+[<\[]([a-z|]+)", harness(name, "--help").out)
    assert choices.split("|") == FORMATS[name]


def test_version(harness):
    ran = harness("--version")
    assert (ran.status, ran.out.strip(), ran.err) == (0, f"harness {__version__}", "")


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
    for name in ("check", "run"):
        assert "hf, mine, reference" in " ".join(harness(name, "--help").out.split())


def test_no_command_shows_the_help_and_fails(harness):
    ran = harness()
    assert (ran.status, ran.out) == (2, "")
    assert "Usage: harness" in ran.err


def test_an_unknown_command(harness):
    ran = harness("chekc")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("H013: No such command 'chekc'")
    assert "try:      harness --help" in ran.err


def test_json_is_recognised_only_as_the_format():
    assert wants_json(["check", "--format", "json"])
    assert wants_json(["check", "--format=json", "--nope"])
    assert not wants_json(["check", "--format", "human", "--prompt", "json"])
