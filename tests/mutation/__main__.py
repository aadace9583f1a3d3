"""Change the judge and the engine's core one token at a time, and see whether their tests notice.

    python -m tests.mutation --sample 100 --seed 0        # what `make mutants` does
    python -m tests.mutation --listed                     # the changes in tests/mutation/listed.py
    python -m tests.mutation --module harness/judge/compare/propagated.py --sample 20

Cosmic Ray makes the mutants. It does not run them: it would change the files of the checkout, and start Python for each
mutant anew, of which every start loads torch. Here torch is loaded once, and each mutant is a fork in which its module
is imported with the changed source, and the tests of that module run until one fails.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.mutation.listed import LISTED
from tests.mutation.mutants import Change, Mutant, changes_of, unchanged
from tests.mutation.subjects import files_of_tests, subjects
from tests.mutation.trial import preload, survives

TIME_LIMIT_S = 600.0


def main(
    sample: Annotated[int, typer.Option(min=1, help="Mutants that are drawn, at different places.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides which.")] = 0,
    module: Annotated[list[str] | None, typer.Option(help="Draw from these files only.")] = None,
    listed: Annotated[bool, typer.Option("--listed", help="Run the listed changes instead.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Change nothing: all must survive.")] = False,
    all_tests: Annotated[bool, typer.Option("--all-tests", help="Run the tests of the whole package.")] = False,
    seconds: Annotated[float, typer.Option(help="Start no further mutant after so long.")] = 36_000.0,
    out: Annotated[Path | None, typer.Option(help="File that gets a line of JSON for each mutant.")] = None,
) -> None:
    """Print each mutant that the tests do not notice, and how many they notice."""
    chosen = list(LISTED) if listed else _draw(module or subjects(), sample, seed)
    if control:
        chosen = [unchanged(path) for path in dict.fromkeys(mutant.path for mutant in chosen)]
    preload()
    started, num_run, num_killed = time.monotonic(), 0, 0
    for mutant in chosen:
        if time.monotonic() - started > seconds:
            break
        outcome = survives(mutant, files_of_tests(mutant.path, all_tests=all_tests), TIME_LIMIT_S)
        num_run, num_killed = num_run + 1, num_killed + (outcome != "survived")
        typer.echo(f"{outcome:9} {num_killed}/{num_run}  {mutant}")
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({"outcome": outcome, "path": mutant.path, "mutant": str(mutant)}) + "\n")
    typer.echo(f"{num_killed} of {num_run} mutants noticed")
    raise typer.Exit(num_killed < num_run)


def _draw(paths: list[str], sample: int, seed: int) -> list[Mutant]:
    """Draw places evenly over all files, and at each place one of the changes that can be made there."""
    generator = random.Random(seed)
    places: dict[tuple[str, int, int], list[Change]] = {}
    for path in sorted(paths):
        for change in changes_of(path):
            places.setdefault((path, change.line, change.column), []).append(change)
    drawn = generator.sample(sorted(places), min(sample, len(places)))
    made = [generator.choice(places[place]).made() for place in drawn]
    return [mutant for mutant in made if mutant is not None]


if __name__ == "__main__":
    typer.run(main)
