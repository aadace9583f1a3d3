"""The page of a training run's gap: its terms over the steps."""

from pathlib import Path

from harness.extensions.rollout.gap_plots import gap_plots, styles_of
from harness.extensions.rollout.report import STEP_HEADERS, history_notes, step_row
from harness.extensions.rollout.result import GapHistory
from harness.report.check.sentences import printable
from harness.report.page.html import page_of

_TEMPLATES = Path(__file__).parent / "template"


def gap_html(history: GapHistory) -> str:
    """Return the page of a training run's gap: its terms over the steps, and a table of the steps."""
    styles = styles_of(history.steps)
    rows = [(step.verdict, step_row(step)) for step in history.steps]
    plots, notes = list(gap_plots(history.steps, styles)), list(history_notes(history))
    return page_of(
        _TEMPLATES, "gap.html.j2", styles=styles, rows=rows, plots=plots, notes=notes, headers=STEP_HEADERS,
        title=printable(history.file), verdict=history.outcome,
    )  # fmt: skip
