"""The settings of an engine beside HF's, for a terminal and for programs."""

from typing import Any

from tabulate import tabulate

from harness.errors import Code, printable
from harness.report.document import plain
from harness.results.settings import SettingsResult, shown_values


def settings_text(result: SettingsResult) -> str:
    """Return a table of both sides, and a line for each setting that differs."""
    rows = [
        [pair.setting, shown_values(pair.engine), shown_values(pair.hf), "differs" if pair.differs else ""]
        for pair in result.pairs
    ]
    table = tabulate(rows, headers=["setting", result.engine, "HF", ""], disable_numparse=True)
    differing = [f"{Code.SETTING_DIFFERS}: {pair}" for pair in result.differing]
    summary = f"{result.num_compared} settings compared, {len(differing)} differ; -: not shown"
    return printable("\n".join([table, "", *differing, summary]), keeps_lines=True)


def settings_json(result: SettingsResult) -> dict[str, Any]:
    """Return both sides as a document; `differs` is null where a side does not show the setting."""
    settings = [
        {
            "setting": pair.setting,
            "engine": plain(pair.engine) or None,
            "hf": plain(pair.hf) or None,
            "differs": pair.differs if pair.engine and pair.hf else None,
        }
        for pair in result.pairs
    ]
    return {
        "schema_version": 1,
        "kind": "settings",
        "engine": result.engine,
        "model": result.model,
        "settings": settings,
        "findings": [{"code": Code.SETTING_DIFFERS.value, "message": str(pair)} for pair in result.differing],
    }
