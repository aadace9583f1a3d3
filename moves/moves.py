"""Move the rooms: run inside a checkout. Moves only: git mv and import paths."""
import re, subprocess, sys
from pathlib import Path

MOVES = {}  # old dotted -> new dotted
for n in "files scratch threads workers environment metrics progress numerics ci_guard json_text".split():
    MOVES[f"harness.{n}"] = f"harness.base.{n}"
for n in "recording checkpoint taps case schedule inspect safetensors_header".split():
    MOVES[f"harness.{n}"] = f"harness.formats.{n}"
MOVES["harness.results"] = "harness.results.check"
for n in "profile gate trace suite fuzz invariance endpoint quant".split():
    MOVES[f"harness.{n}_results"] = f"harness.results.{n}"
MOVES["harness.sketch"] = "harness.oracle.sketch"
for n in "compare explain".split():
    MOVES[f"harness.{n}"] = f"harness.judge.{n}"
MOVES["harness.jobs.profile"] = "harness.profiling.job"
MOVES["harness.jobs"] = "harness.judge.jobs"
for n in "suite fuzz endpoint quant".split():
    MOVES[f"harness.{n}"] = f"harness.campaigns.{n}"
for n in "faults bench".split():
    MOVES[f"harness.{n}"] = f"harness.selfcheck.{n}"
MOVES["harness.properties.reference"] = "harness.selfcheck.properties"
REPORT = {
    "check": "terminal table markdown html json junit merge sentences dtypes".split(),
}
R = {
    "terminal": "check.terminal", "table": "check.table", "markdown": "check.markdown", "html": "page.html", "json": "check.json",
    "junit": "check.junit", "merge": "check.merge", "sentences": "check.sentences", "dtypes": "check.dtypes",
    "endpoint_json": "endpoint.json", "endpoint_text": "endpoint.text", "fuzz_json": "fuzz.json", "fuzz_text": "fuzz.text",
    "invariance_json": "invariance.json", "invariance_text": "invariance.text", "gate_json": "gate.json", "gate_text": "gate.text",
    "profile_json": "profile.json", "profile_text": "profile.text", "trace_text": "trace.text", "flame_html": "trace.flame_html",
    "quant": "quant.text", "fitted_table": "fitted_table", "notebook": "notebook",
}
for old, new in R.items():
    if old != new:
        MOVES[f"harness.report.{old}"] = f"harness.report.{new}"
TESTS = {}  # test folders: old -> new

DOCS = {
 "base": "What every room stands on: files, scratch folders, threads, worker processes, the environment, metrics, numbers.",
 "formats": "What is read and written: recordings, checkpoints, names of taps, cases, schedules.",
 "results": "What each kind of run found: typed records, one file a subject, without torch.",
 "judge": "Is it right: rows put back into HuggingFace's forward and judged, and the causes of what is wrong.",
 "campaigns": "Many checks as one long run: suites, searches, servers, quantised forms.",
 "selfcheck": "The harness measured: known faults and its score on them, speed beside other engines, our own adapters.",
 "report.check": "A check in every form.", "report.endpoint": "A check of a server in every form.", "report.fuzz": "A search in every form.",
 "report.invariance": "A search for changes of bits in every form.", "report.gate": "A gate in every form.", "report.profile": "A profile in every form.",
 "report.trace": "Figures of a trace in every form.", "report.quant": "Quantised forms side by side.",
}

def git(*a):
    return subprocess.run(["git", *a], check=True, capture_output=True, text=True).stdout

def path_of(dotted):
    p = Path(*dotted.split("."))
    return p if p.is_dir() else p.with_suffix(".py")

def main():
    # 1. moves, through a temporary name where a module becomes a package of its own name
    order = sorted(MOVES, key=lambda k: -k.count("."))
    kinds = {}
    staged = []
    for old in order:
        p = path_of(old)
        if not p.exists():
            print("missing", old); continue
        kinds[old] = p
        tmp = Path("harness") / ("__moving__" + old.replace(".", "_") + p.suffix)
        git("mv", str(p), str(tmp)); staged.append((old, p, tmp))
    paths = {}
    for old, p, tmp in staged:
        new = Path(*MOVES[old].split("."))
        new = new.with_suffix(p.suffix) if p.suffix else new
        new.parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(tmp), str(new))
        paths[str(p)] = str(new)
    for room, doc in DOCS.items():
        init = Path("harness", *room.split("."), "__init__.py")
        if not init.exists():
            init.write_text(f'"""{doc}"""\n'); git("add", str(init))
    for left in ("harness/jobs",):
        if Path(left).exists():
            init = Path(left, "__init__.py")
            rest = [x for x in Path(left).rglob("*") if x.suffix == ".py"]
            print("left in", left, rest)
    # 2. text
    names = re.compile(r"\b(" + "|".join(re.escape(k) for k in sorted(MOVES, key=len, reverse=True)) + r")\b(?!\.md)")
    path_re = re.compile(r"(?<![\w-])(?<!\w/)(" + "|".join(re.escape(k) for k in sorted(paths, key=len, reverse=True)) + r")(?![\w])")
    for name in git("ls-files").split("\n"):
        f = Path(name)
        if not name or not f.exists() or f.suffix not in {".py", ".md", ".toml", ".sh", ".cfg", ".yml", ".yaml", "", ".txt", ".cpp", ".h", ".html"} or name.startswith("reports/") or name == "CHANGELOG.md":
            continue
        try: text = f.read_text()
        except UnicodeDecodeError: continue
        new = names.sub(lambda m: MOVES[m[1]], text)
        new = path_re.sub(lambda m: paths[m[1]], new)
        # from harness import x
        def from_import(m):
            items = [i.strip() for i in m[2].split(",")]
            out = {}
            for i in items:
                base = i.split(" as ")[0]
                target = MOVES.get(f"harness.{base}")
                parent = target.rpartition(".")[0] if target else "harness"
                out.setdefault(parent, []).append(i)
            return "\n".join(f"{m[1]}from {parent} import {', '.join(v)}" for parent, v in out.items())
        new = re.sub(r"^([ \t]*)from harness import ([\w, ]+)$", from_import, new, flags=re.M)
        def from_room(m):
            items = [i.strip() for i in m[3].split(",")]
            out = {}
            for i in items:
                base = i.split(" as ")[0]
                target = MOVES.get(f"{m[2]}.{base}")
                parent = target.rpartition(".")[0] if target else m[2]
                out.setdefault(parent, []).append(i if not target or target.rpartition(".")[2]==base else f"{target.rpartition('.')[2]} as {base}")
            return "\n".join(f"{m[1]}from {parent} import {', '.join(v)}" for parent, v in out.items())
        new = re.sub(r"^([ \t]*)from (harness\.(?:report|properties)) import ([\w, ]+)$", from_room, new, flags=re.M)
        if new != text: f.write_text(new)
main()
