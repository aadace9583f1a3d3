"""Damaged files by the hundred: each is refused with a code or used, and nothing else happens. `make fuzz` has more."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from . import fuzzer
from .exchanges import exchanges
from .fuzzer import Handled, fuzz
from .mutate import damaged, damaged_header, damaged_json
from .target import Target
from .targets import Templates, targets

INPUTS = 12
SECONDS_OF_A_TARGET = 0.5


PRICES = [pytest.param(False, id="cheap"), pytest.param(True, id="dear", marks=pytest.mark.slow)]
"""Whether an input of the target runs a model."""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    return Templates(tmp_path_factory.mktemp("template"))


def chosen(templates: Templates, *, is_dear: bool) -> list[Target]:
    return [target for target in targets(templates) if (target.seconds >= 1) is is_dear]


@pytest.mark.parametrize("is_dear", PRICES)
def test_no_damaged_input_is_handled_badly(templates: Templates, subtests: pytest.Subtests, is_dear: bool) -> None:
    for target in chosen(templates, is_dear=is_dear):
        with subtests.test(target.name):
            count = max(1, min(INPUTS, int(SECONDS_OF_A_TARGET / target.seconds)))
            handled = [fuzz(target, templates.folder, seed) for seed in range(count)]
            assert [what for item in handled for what in item.violations] == []


def test_no_damaged_message_is_handled_badly(subtests: pytest.Subtests) -> None:
    with exchanges() as messages:
        for message in messages:
            with subtests.test(message.name):
                handled = [message.fuzz(seed) for seed in range(INPUTS)]
                assert [what for item in handled for what in item.violations] == []


def test_the_sound_messages_are_taken() -> None:
    with exchanges() as messages:
        endings = {
            message.name: message.handle(json.dumps(message.template).encode(), Random(0)) for message in messages
        }
    sound = {"200", "0", "1"}
    refused = {"body of /v1/chat/completions"}  # the checkpoint has no template
    assert {name for name, (ending, _) in endings.items() if ending not in sound} == refused
    assert not [violations for _, violations in endings.values() if violations]


@pytest.mark.parametrize("is_dear", PRICES)
def test_the_sound_files_are_taken(templates: Templates, subtests: pytest.Subtests, is_dear: bool) -> None:
    """Or damage would not matter: each target's command gets as far as its file."""
    for target in chosen(templates, is_dear=is_dear):
        with subtests.test(target.name):
            sound = replace(target, mutations=[lambda content, _random: content], repair=lambda _folder: None)
            assert fuzz(sound, templates.folder, 0) == Handled(ending=target.sound, violations=[])


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("return 3", "exit status 3"),
        ("raise BaseException", "exit status -1"),
        ("print('\\x1b[2J'); return 0", "characters that a terminal obeys"),
        ("Path(arguments[-1]).unlink(); return 0", "files lost or changed"),
        ("print('Traceback'); return 1", "a traceback"),
        ("return 2", "no code"),
    ],
)
def test_what_a_command_must_not_do_is_seen(templates, monkeypatch, does, words):
    scope: dict[str, object] = {"Path": Path}
    exec(f"def command(arguments):\n    {does}", scope)
    monkeypatch.setattr(fuzzer, "run", scope["command"])
    (target,) = [target for target in targets(templates) if target.name == "trace"]
    (violation,) = fuzz(target, templates.folder, 0).violations
    assert words in violation


@pytest.mark.slow
def test_nothing_half_written_reads_as_whole() -> None:
    """In a process of its own, which forks. `make fuzz` interrupts 300 runs."""
    command = [sys.executable, "-m", "tests.fuzz.interrupt", "--runs", "20"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert (ran.returncode, ran.stdout) == (0, "20 interrupted runs, 0 violations\n"), ran.stdout + ran.stderr


@pytest.mark.parametrize("mutation", [damaged, damaged_json, damaged_header])
def test_a_seed_is_a_damage(templates, mutation):
    from random import Random

    file = "model/config.json" if mutation is not damaged_header else "model/model-00001-of-00002.safetensors"
    content = (templates.folder / file).read_bytes()
    assert mutation(content, Random(3)) == mutation(content, Random(3))
    assert len({mutation(content, Random(seed)) for seed in range(20)}) > 15
