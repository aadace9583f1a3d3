"""`harness gate`: compare a profile with a baseline, and time the engine against another version."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.files import parse_json, read_text
from harness.command import forms
from harness.command.grouped import grouped
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.results.gate import PhaseTime


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """Options about the version that the engine is timed against."""

    against: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Also time the engine against another version, in turns: a git revision, a wheel or a folder.",
        ),
    ] = None
    against_repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Repository of the revision. [default: the checkout of the engine]"),
    ] = None
    against_package: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Package that changed. Repeatable. [default: the packages of the adapter]"),
    ] = None
    blocks: Annotated[
        int, typer.Option(metavar="N", min=5, help="Maximum number of timed blocks; a block runs old, new, new, old.")
    ] = 400
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S", min=1, help="Time limit for timing in seconds; it ends earlier once the ratio is certain."
        ),
    ] = 240
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", min=0.001, help="Smallest slowdown that is reported, as a fraction.")
    ] = 0.03

    def check(self) -> None:
        """Refuse options about another version if none is named.

        Raises:
            HarnessError: BAD_OPTION.
        """
        if self.against is None and (self.against_repo or self.against_package):
            option = "--against-repo" if self.against_repo else "--against-package"
            what, hint = "there is nothing to time against", "--against VERSION"
            raise HarnessError(Code.BAD_OPTION, what, where=option, hint=hint)

    def time(self, profile: Path) -> "dict[str, PhaseTime] | None":
        """Time the profile's engine in turn with the other version; None if none is named."""
        if self.against is None:
            return None
        from harness.profiling.gate.against import TimingLength, time_against
        from harness.profiling.gate.baseline import profile_file

        with progress_bar() as report:
            return time_against(
                self.against,
                parse_json(read_text(profile_file(profile))),
                length=TimingLength(num_blocks=self.blocks, seconds=self.seconds),
                tolerance=self.tolerance,
                repository=self.against_repo,
                packages=tuple(self.against_package or ()),
                progress=report,
            )


@grouped
def gate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Folder written by `harness profile`.")],
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="Baseline file with the limits of a profile.")],
    *,
    accept: Annotated[
        bool, typer.Option("--accept", help="Make the profile the new baseline, and show the changes.")
    ] = (False),
    timing: TimingOptions,
    format: Annotated[str, forms.GATE.option()] = "human",
) -> int:
    """Compare a profile with a baseline.

    Counts must be equal; FLOPs, bytes and peak memory may differ by 0.5 %. The exit status is 4 if the profile needs
    more than the baseline, or if a phase takes longer than in the version of --against.
    """
    from harness.base.environment import refuse_update
    from harness.profiling.gate.baseline import run_gate
    from harness.results.gate import GateVerdict

    if accept:
        refuse_update("--accept")
    timing.check()
    result = run_gate(profile, baseline, accept=accept)
    times = timing.time(profile)
    if times is not None:
        result = replace(result, times=times)
    forms.GATE.show(result, format)
    return ExitStatus.REGRESSION if result.verdict is GateVerdict.REGRESSION else ExitStatus.PASS
