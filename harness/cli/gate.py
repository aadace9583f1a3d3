"""`harness gate`: what a profile needs beyond its baseline, and whether it takes longer than another version."""

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
            help="Also time the engine in turn with another version: a git revision, a wheel, a folder.",
        ),
    ] = None
    against_repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Repository of the revision. [default: the engine's own checkout]"),
    ] = None
    against_package: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Package that changed. Repeatable. [default: those of the adapter]"),
    ] = None
    blocks: Annotated[int, typer.Option(metavar="N", min=5, help="Most blocks old, new, new, old to be timed.")] = 400
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, help="Most time for them; less where the ratio is sure before.")
    ] = 240
    tolerance: Annotated[float, typer.Option(metavar="SHARE", min=0.001, help="Slowdown that is worth an alarm.")] = (
        0.03
    )

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
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Folder that `harness profile` has filled.")],
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="File with what a profile may need.")],
    *,
    accept: Annotated[bool, typer.Option("--accept", help="Make the profile the baseline, and show what changes.")] = (
        False
    ),
    timing: TimingOptions,
    format: Annotated[str, forms.GATE.option()] = "human",
) -> int:
    """Hold a profile against a baseline.

    Counts must be equal; FLOPs, bytes and the peak may move by 0.5 %. Exit status 4 if anything needs more, or if a
    phase takes longer than in the version that --against names.
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
