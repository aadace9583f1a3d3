"""The commands of extensions and their options: what scripts rely on changes here first."""

import re
from importlib import import_module
from inspect import signature

import pytest

from harness.base import plugins
from harness.cli.main import commands
from harness.command.entry import CommandEntry, Panel
from harness.command.forms import Forms

from ..integration.command_tree import leaves, parameters, with_an_empty_value

OPTIONS = {
    "trace summary": "files --phase-pattern --peak-tflops --format",
    "trace diff": "before after --phase-pattern --format",
    "trace critical-path": "files --within --instance --format",
    "trace flame": "file --out",
    "trace memory": "files --out --at --format",
    "trace memory-diff": "before after --format",
    "fuzz run": (
        "--model --engine --engine-option --dtype --device --truth --seconds --seed --first --workload-seconds "
        "--out --replay --fault --local-files-only --format"
    ),
    "fuzz invariance": (
        "--model --engine --engine-option --dtype --device --truth --seconds --seed --workload-seconds --fault "
        "--local-files-only --format"
    ),
    "fuzz poison": (
        "--model --engine --engine-option --dtype --device --truth --seconds --seed --workload-seconds --fault "
        "--local-files-only --format"
    ),
    "suite run": (
        "cases --matrix --jobs --ray --store --store-patience --out --resume --label --local-files-only --format"
    ),
    "suite diff": "old new --format",
    "suite history": "runs --out --format",
    "server check": (
        "--endpoint --served-model --concurrency --request-timeout --model --hf --dtype --device --truth --prompt "
        "--prompt-file --token-ids --max-new-tokens --lora --other-lora --explain-seconds --again --local-files-only "
        "--format"
    ),
    "server sampler": (
        "--endpoint --served-model --concurrency --request-timeout --model --device --truth --dtype --draws "
        "--seed --order --only --local-files-only --format"
    ),
    "server chat": (
        "--endpoint --served-model --concurrency --request-timeout --model --conversations --seed "
        "--local-files-only --format"
    ),
    "server audit": (
        "--endpoint --served-model --concurrency --request-timeout --model --device --truth --hypotheses --dtype "
        "--tokens --ask --seed --local-files-only --format"
    ),
    "server load": (
        "--endpoint --served-model --concurrency --request-timeout --model --device --truth --dtype "
        "--num-requests --prompt-tokens --new-tokens --requests --rate --burst --limit --at-least --judged --seed "
        "--against --blocks --local-files-only --format"
    ),
    "bench engine": (
        "--shape --model --dtype --device --repeats --requests --batch-size --prompt-tokens --engine --peer "
        "--float8-weights --seed --engine-option --out --local-files-only --format"
    ),
    "estimate": "--model --gpu --dtype --cache-dtype --requests --context --block-size --profile --format",
    "faults": (
        "--tool --only --category --engine --sample --drawn --variants --power --seed --limit --check --out --device "
        "--format"
    ),
    "quant": (
        "--model --types --file --caches --engine --engine-option --dtype --text-file --tokens --sequences --seed "
        "--pad --parts --out --local-files-only --format"
    ),
    "rollout": (
        "rollouts --model --trainer --layout --engine --engine-option --previous --engine-weights --head "
        "--weight-version --rows --dtype --device --truth --local-files-only --history --out --format"
    ),
}
"""Options and arguments of each command, in the order of its help."""
FORMATTED = [name for name, options in OPTIONS.items() if "--format" in options]


def leaf(name):
    return leaves(frozenset({name.split()[0]}))[name]


def test_the_help_has_at_most_17_commands_in_panels():
    assert len(commands()) <= 17
    panels = [command.panel for command in commands().values()]
    assert panels == sorted(panels, key=list(Panel).index)


def test_each_entry_point_names_a_command_whose_help_is_one_line():
    for command in plugins.load_all(plugins.COMMANDS, CommandEntry).values():
        assert command.help.endswith(".")
        assert "\n" not in command.help


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_promised(name):
    assert parameters(leaf(name)) == OPTIONS[name].split()


@pytest.mark.parametrize("name", OPTIONS)
def test_help_of_a_command_explains_every_option(harness, name):
    ran = harness(*name.split(), "--help")
    assert ran.status == 0
    assert all(option in ran.out for option in OPTIONS[name].split() if option.startswith("--"))
    assert all(parameter.help for parameter in leaf(name).params if parameter.opts[0] != "--help")


@pytest.mark.parametrize("name", FORMATTED)
def test_a_form_that_a_result_lacks_is_refused(harness, name):
    required = [parameter for parameter in leaf(name).params if parameter.required]
    values = [[*([parameter.opts[0]] if parameter.opts[0].startswith("-") else []), "."] for parameter in required]
    ran = harness(*name.split(), *(word for words in values for word in words), "--format", "xml")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("H013: this result has no form 'xml'\n")


@pytest.mark.parametrize(
    "name",
    sorted({command.target.partition(":")[0] for command in plugins.load_all(plugins.COMMANDS, CommandEntry).values()}),
)
def test_every_form_that_is_offered_can_be_made(name):
    for result in [value for value in vars(import_module(name)).values() if isinstance(value, Forms)]:
        for form in result.functions:
            assert signature(result.function(form)).parameters


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_given_empty_is_an_error(harness, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)  # which an empty path would name
    for arguments in with_an_empty_value(leaf(name)):
        ran = harness(*name.split(), *arguments)
        assert ran.status == 2
        option = arguments[-2] if len(arguments) == 2 else "[A-Z]+"
        assert re.match(rf"H013: {option} is given empty\n", ran.err), ran.err
    assert list(tmp_path.iterdir()) == []
