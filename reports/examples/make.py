"""Make the examples again: `python reports/examples/make.py`, from the root of a checkout; needs Debian's chromium.

Every text on the page is what a command printed, every picture a page that a command wrote.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOUND = "act_TF = self.activation(gate_TF) * up_TF"
CHANGED = "act_TF = self.activation(gate_TF).bfloat16().to(gate_TF.dtype) * up_TF"


@dataclass(frozen=True, slots=True)
class Picture:
    """A part of a page: pixels from its top, and how many."""

    top: int
    height: int
    width: int = 1200


def run(command: str, folder: Path, *, status: int, changed: Path | None = None) -> str:
    """Run a command in a folder and return what it prints; it has to end with this status.

    Args:
        command: words, separated by spaces; a pattern of files stands for those files.
        folder: where it runs.
        status: the exit status that belongs to the example.
        changed: a folder whose packages come before the installed ones.
    """
    environment = {**os.environ, "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    if changed is not None:
        environment["PYTHONPATH"] = str(changed)
    ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode != status:
        raise SystemExit(f"{command}: status {ran.returncode}, expected {status}\n{ran.stdout}{ran.stderr}")
    return "\n".join(line.rstrip() for line in ran.stdout.splitlines()).strip("\n")


def changed_engine(folder: Path) -> Path:
    """Copy the reference engine, and let its MLP round the activation to bfloat16."""
    shutil.copytree(ROOT / "reference_engine", folder / "reference_engine")
    layers = folder / "reference_engine" / "layers.py"
    text = layers.read_text(encoding="utf-8")
    assert SOUND in text
    layers.write_text(text.replace(SOUND, CHANGED), encoding="utf-8")
    return folder


def photograph(page: Path, picture: Picture, out: Path) -> None:
    """Write a part of a page as PNG."""
    window = f"--window-size={picture.width},{picture.top + picture.height}"
    shot = out.with_suffix(".whole.png")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window, f"--screenshot={shot}"]
    subprocess.run(["chromium", *flags, page.as_uri()], check=True, capture_output=True)
    from PIL import Image

    with Image.open(shot) as whole:
        part = whole.crop((0, picture.top, picture.width, picture.top + picture.height))
        part.quantize(colors=64).save(out, optimize=True)
    shot.unlink()


def main() -> None:
    """Run the commands, and write the page and its pictures beside this file."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        changed = changed_engine(out / "changed")
        check = run("harness faults --check wrong-block --out report", out, status=1)
        photograph(out / "report/report.html", Picture(0, 1440), HERE / "report-verdict.png")
        run("harness profile --out profile", out, status=0)
        photograph(out / "profile/report.html", Picture(0, 1340), HERE / "report-profile.png")
        summary = run("harness trace summary profile/trace/reference-decode-*.json.gz", out, status=0)
        run("harness trace flame profile/trace/reference-decode-*.json.gz --out flame.html", out, status=0)
        photograph(out / "flame.html", Picture(0, 300), HERE / "flame.png")
        run("harness record --out before", out, status=0)
        run("harness record --out after", out, status=0, changed=changed)
        diff = run("harness diff before after", out, status=1)
        run("harness profile --quick --out profile-before", out, status=0)
        run("harness gate profile-before baseline.json --accept", out, status=0)
        run("harness profile --quick --out profile-after", out, status=0, changed=changed)
        gate = run("harness gate profile-after baseline.json", out, status=4, changed=changed)
    template = (HERE / "page.txt").read_text(encoding="utf-8")
    (HERE / "README.md").write_text(
        template.replace("{first}", first_lines(check)).replace("{summary}", summary)
        .replace("{diff}", diff).replace("{gate}", gate),
        encoding="utf-8",
    )  # fmt: skip


def first_lines(text: str) -> str:
    """Return the headline of a check and its first divergence, without the table between."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("First divergence"))
    end = next((at for at in range(begin, len(lines)) if not lines[at].strip()), len(lines))
    return "\n".join([lines[0], "...", *lines[begin:end]])


if __name__ == "__main__":
    main()
