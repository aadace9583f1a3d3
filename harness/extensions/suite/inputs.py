"""The content that a case is checked with: `--resume` keeps a result only while all of it is the same."""

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.base.files import json_digest
from harness.errors import HarnessError
from harness.extensions.suite.fingerprint import Installation, installed_digest
from harness.extensions.suite.preflight import installed_in
from harness.extensions.suite.task import Environment, SuiteCase
from harness.formats.checkpoint import resolve
from harness.formats.checkpoint.digest import folder_digest


def with_inputs(
    cases: Sequence[SuiteCase],
    environments: Mapping[str, Environment],
    installed: Mapping[str, Installation],
    *,
    local_files_only: bool,
) -> list[SuiteCase]:
    """Return the cases with digests of what they name: the model, the files of their options, the interpreter.

    What this machine does not have (another machine's model or environment) has a digest that no other run gives: its
    cases are run again. `installed` is what some of the environments have, as far as it was looked for.
    """
    models = {(case.case.model, case.case.hf) for case in cases}
    contents = {named: _model_digest(*named, local_files_only) for named in models}
    found = {name: installed.get(name) or installed_in(place) for name, place in environments.items()}
    places: dict[str | None, str] = {name: place.digest if place else _unknown() for name, place in found.items()}
    places[None] = installed_digest()

    def changed(case: SuiteCase) -> SuiteCase:
        model, files = contents[case.case.model, case.case.hf], _files_of_options(case)
        told = [model, files, places.get(case.environment) or _unknown()]
        return case.model_copy(update={"model_digest": model, "inputs": json_digest(told)})

    return [changed(case) for case in cases]


def _model_digest(model: str, hf: str | None, local_files_only: bool) -> str:
    """Return a digest of all that lies in a model's folder: weights, config, tokenizer, how it generates."""
    try:
        folder = resolve(model, local_files_only=local_files_only, hf=hf)
        origin = resolve(hf, local_files_only=local_files_only) if hf else None
        return json_digest([folder_digest(folder), origin and folder_digest(origin)])
    except (HarnessError, OSError):
        return _unknown()


def _files_of_options(case: SuiteCase) -> list[tuple[str, str]]:
    """Return digests of the files and folders that options of the engine name, alone or in a list."""
    found = []
    for value in case.case.engine_options.values():
        for text in dict.fromkeys([str(value), *re.split(r"[,=;]", str(value))]):
            try:
                if text and Path(text).exists():
                    found.append((text, folder_digest(Path(text))))
            except (OSError, ValueError):
                found.append((text, _unknown()))
    return found


def _unknown() -> str:
    return uuid.uuid4().hex
