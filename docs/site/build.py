"""Build the documents as a site: `python docs/site/build.py [FOLDER]`, or `make docs`.

The documents link each other, reports and programs as they lie in the repository. So what is linked is copied to the
same places below one folder, and Zensical makes the pages of it. A link that leads nowhere ends the build (`--strict`).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "reports/**/*.md", "cases/**/*.md")
_LINK = re.compile(r"\]\((?P<path>[^)#:]+)(?:#[^)]*)?\)")
"""A link to a file; those with a colon lead to the web."""


def pages() -> list[Path]:
    """Return the documents, relative to the repository; what runs have left in `reports/runs` is none."""
    documents = {path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern)}
    return sorted(page for page in documents if page.parts[:2] != ("reports", "runs"))


def links(page: Path) -> Iterator[str]:
    """Yield the files that a document links, as they are written in it; code is no text."""
    text = re.sub(r"^```.*?^```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from (match["path"] for match in _LINK.finditer(text))


def gather(folder: Path) -> None:
    """Copy the documents, and the files that they link, below a folder; links to folders become text."""
    for page in pages():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_without_folders(page), encoding="utf-8")
        for link in links(page):
            file = (ROOT / page.parent / link).resolve()
            if file.is_file() and file.suffix != ".md":
                copy = folder / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)


def _without_folders(page: Path) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in set(links(page)):
        if (ROOT / page.parent / link).is_dir():
            text = re.sub(rf"\[([^\]]*)\]\({re.escape(link)}\)", r"\1", text)
    return text


def main(out: Path) -> int:
    """Write the site into `out`; return the exit status of Zensical."""
    gathered = out / "gathered"
    shutil.rmtree(gathered, ignore_errors=True)
    gather(gathered)
    shutil.copy(HERE / "wide.css", gathered)
    config = out / "mkdocs.yml"
    config.write_text((HERE / "mkdocs.yml").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", config]
    return subprocess.run(command, check=False, env={**os.environ, "NO_COLOR": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site")))
