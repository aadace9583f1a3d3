"""Results of a check of a server's sampler, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.extensions.server.logprobs import DefinitionResult
from harness.extensions.server.result import ServerResult
from harness.results.check import Finding, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """The draws of one setting."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    name: str
    settings: Mapping[str, Any]
    """Parameters that are no defaults."""
    num_requests: int
    num_draws: int
    num_outside: int
    """Draws that no rounding explains."""
    shift: float
    """Largest distance of the draws' distribution function to the exact one (Kolmogorov's), in three orders."""
    shift_bound: float
    follows: str | None
    """The chain that the draws follow: `as asked`, the name of what is done instead, or None: none that is known."""
    not_judged: str | None = None
    """Why nothing was judged: the server's words."""
    is_claimed: bool = True
    """Whether the setting was asked for; if not, the server's own defaults were looked at, which are not wrong."""
    body: Mapping[str, Any] | None = None
    """The body of one request, to send by hand."""
    findings: tuple[Finding, ...] = ()

    @classmethod
    def left_out(cls, name: str, settings: Mapping[str, Any], why: str) -> "SettingResult":
        """Return the result of a setting that was not asked for."""
        return cls(
            name=name, settings=settings, num_requests=0, num_draws=0, num_outside=0, shift=0.0, shift_bound=0.0,
            follows=None, not_judged=why,
        )  # fmt: skip

    @property
    def outcome(self) -> Outcome:
        """Nothing, if no draw was judged."""
        if self.findings:
            return Outcome.MISMATCH
        return Outcome.PASS if self.num_draws else Outcome.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """Requests that were sent again with the same seed."""

    num_requests: int
    num_draws: int
    num_alone: int
    """Requests that drew other tokens alone than among others."""
    num_again: int
    """Requests that drew other tokens a second time, among other neighbours."""
    num_excused: int
    """Requests that may differ, because rounding decides their near-ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerResult(ServerResult):
    """A whole check of a server's sampler."""

    IN_DOCUMENT: ClassVar = ("outcome", "num_draws", "not_judged")
    order: tuple[str, ...]
    """The steps that are claimed."""
    false_alarm: float
    """A sound server alarms in fewer runs than this share."""
    num_tests: int
    settings: tuple[SettingResult, ...]
    seeds: SeedResult | None
    """None: the server takes no seeds."""
    definitions: tuple[DefinitionResult, ...]
    """Readings of the log probabilities; empty if there are none."""
    would_find: tuple[str, ...]
    """Deviations that the draws find in 99 of 100 runs."""
    could_miss: tuple[str, ...]
    """Deviations that are found less often, and do change the distribution: of all settings, or of some alone."""
    no_change: tuple[str, ...] = ()
    """Deviations that change no distribution of these rows, so that nothing is known of them."""
    findings: tuple[Finding, ...] = ()
    """Of no single setting."""
    notes: tuple[str, ...] = ()
    server_s: float = 0.0
    truth_s: float = 0.0

    @property
    def num_draws(self) -> int:
        """Draws that were judged."""
        return sum(setting.num_draws for setting in self.settings)

    @property
    def not_judged(self) -> dict[str, str]:
        """What was not judged, and why."""
        reasons = {setting.name: setting.not_judged for setting in self.settings if setting.not_judged}
        if self.seeds is None:
            reasons["seeds"] = "the server takes none, or does not follow them"
        elif self.seeds.num_excused >= self.seeds.num_requests:
            reasons["seeds"] = "rounding may change the draws of every request that was sent again"
        if not self.definitions:
            reasons["log probabilities"] = "the server gives none"
        return reasons

    @property
    def outcome(self) -> Outcome:
        """Mismatch if anything has a finding; nothing if the draws would find no deviation."""
        if self.findings or any(setting.findings for setting in self.settings):
            return Outcome.MISMATCH
        return Outcome.PASS if self.would_find else Outcome.NOTHING
