"""The effort of the suites: three named sets of Hypothesis settings."""

from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One set of settings."""

    max_examples: int
    """Examples of each property."""
    num_steps: int
    """Rules that a state machine runs in one example."""
    derandomize: bool
    """Whether every run tries the same examples; otherwise `--hypothesis-seed` chooses.

    Among them are numbers that stand in the loaded modules: with other code, a few examples are others.
    """

    def settings(self) -> settings:
        """Return what Hypothesis understands. No deadline: an engine's first call may compile."""
        return settings(
            max_examples=self.max_examples,
            stateful_step_count=self.num_steps,
            derandomize=self.derandomize,
            database=None,
            deadline=None,
            phases=(Phase.generate,),  # making it smaller is `minimize`
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )


PROFILES = {
    "dev": Profile(max_examples=100, num_steps=30, derandomize=True),
    "ci": Profile(max_examples=1_000, num_steps=40, derandomize=True),
    "thorough": Profile(max_examples=20_000, num_steps=50, derandomize=False),
}
"""By the name that `--properties-profile` takes."""
