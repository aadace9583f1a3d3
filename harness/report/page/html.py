"""Results as one page: one file that needs no network, and lets nothing from outside become markup."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

from harness.report.memory import PLACE_HEADERS
from harness.report.page.check_view import check_view
from harness.report.page.memory_view import device_views
from harness.report.page.profile_view import profile_view
from harness.report.templates import templates
from harness.results.check import CheckResult
from harness.results.memory import MemorySummary
from harness.results.profile import MemoryTimeline, ProfileResult

REPORT_NAME = "report.html"
"""Name of the page's file in an output folder."""
_TEMPLATES = Path(__file__).parent / "template"


def report_html(check: CheckResult | None = None, profile: ProfileResult | None = None) -> str:
    """Return the page for a check, a profile, or both.

    Links to traces and snapshots are those of the profile: they hold where the page lies in the profile's folder.

    Raises:
        ValueError: neither is given.
    """
    if check is None and profile is None:
        raise ValueError("a report needs a check or a profile")
    return _page(
        check=None if check is None else check_view(check),
        profile=None if profile is None else profile_view(profile),
        memory=None,
    )


def memory_html(read: Iterable[tuple[MemorySummary, Sequence[MemoryTimeline | None]]]) -> str:
    """Return the page of memory snapshots: for each device the timeline of its history, and what holds how much."""
    views = [view for summary, timelines in read for view in device_views(summary, timelines)]
    return _page(check=None, profile=None, memory=views, headers=PLACE_HEADERS)


def _page(**views: object) -> str:
    script = _text("script.js")
    views |= {"script": Markup(script), "style": Markup(_text("style.css"))}
    views["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates(_TEMPLATES).get_template("report.html.j2").render(views)


def page_of(folder: Path, template: str, **views: object) -> str:
    """Return a page of an extension: its template may use those of this package, and `style` is theirs."""
    return templates(folder, _TEMPLATES).get_template(template).render(views, style=Markup(_text("style.css")))


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
