"""Move tests so that they mirror the rooms; run inside a checkout after moves.py."""
import re, subprocess, os
from pathlib import Path
U = "tests/unit"
MOVES = {f"{U}/{a}": f"{U}/{b}" for a, b in {
    "compare": "judge/compare", "explain": "judge/explain",
    "suite": "campaigns/suite", "fuzz": "campaigns/fuzz", "endpoint": "campaigns/endpoint", "quant": "campaigns/quant",
    "faults": "selfcheck/faults", "bench": "selfcheck/bench",
    "recording": "formats/recording", "gguf": "formats/gguf",
    **{f"test_{n}.py": f"formats/test_{n}.py" for n in "case checkpoint checkpoints inspect merge_ranks recording recording_failures recording_fuzz recording_hostile recording_page safetensors_header schedule taps".split()},
    **{f"test_{n}.py": f"base/test_{n}.py" for n in "metrics scratch threads workers files numerics ci_guard environment progress".split()},
    "test_results.py": "results/test_results.py",
}.items()}
def git(*a): return subprocess.run(["git", *a], check=True, capture_output=True, text=True).stdout
before = [f for f in git("ls-files", "tests").split("\n") if f]
def moved(path):
    for old, new in MOVES.items():
        if path == old or path.startswith(old + "/"): return new + path[len(old):]
    return path
def target_of(file, dots, dotted):
    """old path prefix (no suffix) that a relative import names"""
    base = Path(file).parent
    for _ in range(len(dots) - 1): base = base.parent
    return str(base / dotted.replace(".", "/")) if dotted else str(base)
known = set(before) | {str(p) for f in before for p in Path(f).parents}
def new_of(prefix):
    if prefix + ".py" in known: return moved(prefix + ".py")[:-3]
    return moved(prefix)
def relative(file, prefix):
    base = Path(file).parent; target = Path(prefix)
    up = 0
    while not target.is_relative_to(base):
        base = base.parent; up += 1
    return "." * (up + 1) + ".".join(target.relative_to(base).parts)
rewritten = {}
for file in before:
    if not file.endswith(".py") or not Path(file).exists(): continue
    text = Path(file).read_text(); new_file = moved(file)
    def sub(m):
        dots, dotted, names = m[2], m[3], m[4]
        prefix = target_of(file, dots, dotted)
        if not dotted or prefix + ".py" not in known:   # a package: its names may be modules
            items = [n.strip() for n in names.strip("()").split(",") if n.strip()]
            prefixes = {str(Path(new_of(f"{prefix}/{i.split(' as ')[0]}")).parent) if f"{prefix}/{i.split(' as ')[0]}.py" in known else new_of(prefix) for i in items}
            assert len(prefixes) == 1, (file, m[0], prefixes)
            return f"{m[1]}from {relative(new_file, prefixes.pop())} import {names}"
        return f"{m[1]}from {relative(new_file, new_of(prefix))} import {names}"
    out = re.sub(r"^([ \t]*)from (\.+)([\w.]*) import (\([^)]*\)|[^\n]+)", sub, text, flags=re.M)
    depth = len(Path(new_file).parts) - len(Path(file).parts)
    if depth:
        out = re.sub(r"(Path\(__file__\)\.parents\[)(\d+)\]", lambda m: f"{m[1]}{int(m[2]) + depth}]", out)
    rewritten[file] = out if out != text else None
for file, out in rewritten.items():
    if out is not None: Path(file).write_text(out)
for old, new in MOVES.items():
    if Path(old).exists():
        Path(new).parent.mkdir(parents=True, exist_ok=True); git("mv", old, new)
    else: print("no", old)
# path and dotted mentions of tests
dotted = {o.replace("/", ".").removesuffix(".py"): n.replace("/", ".").removesuffix(".py") for o, n in MOVES.items()}
paths_re = re.compile(r"(?<![\w-])(?<!\w/)(" + "|".join(re.escape(k) for k in sorted(MOVES, key=len, reverse=True)) + r")(?![\w])")
dots_re = re.compile(r"\b(" + "|".join(re.escape(k) for k in sorted(dotted, key=len, reverse=True)) + r")\b")
for name in git("ls-files").split("\n"):
    f = Path(name)
    if not name or not f.exists() or f.suffix not in {".py", ".md", ".toml", ".sh", "", ".txt"} or name.startswith("reports/") or name == "CHANGELOG.md": continue
    try: text = f.read_text()
    except UnicodeDecodeError: continue
    new = dots_re.sub(lambda m: dotted[m[1]], paths_re.sub(lambda m: MOVES[m[1]], text))
    if new != text: f.write_text(new)
