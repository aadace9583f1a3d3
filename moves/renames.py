"""Rename public classes whose names stand twice; run inside a checkout after the moves."""
import ast, io, re, subprocess, sys, tokenize
from pathlib import Path
H = "harness."
RENAMES = {
 H+"campaigns.endpoint.answer": {"Answer": "Completion"},
 H+"campaigns.suite.task": {"Answer": "TaskResult"},
 H+"cli.answer": {"Answer": "TimedContinuation"},
 H+"engines.module.forward": {"Answer": "ForwardResult"},
 H+"engines.llamacpp.batch": {"Batch": "LlamaBatch"},
 H+"engines.torch_modules.step_watcher": {"Batch": "ForwardBatch"},
 H+"judge.compare.batch": {"Batch": "PaddedBatch"},
 H+"judge.compare.conventions.entry": {"Subject": "SuspectRows"},
 H+"results.gate": {"Subject": "Quantity"},
 H+"campaigns.endpoint.schedules": {"Run": "ScheduledRequests"},
 H+"campaigns.fuzz.changes": {"Run": "RunSetting", "Change": "Variation"},
 H+"profiling.gate.step_worker": {"Run": "LoadedEngine"},
 H+"campaigns.fuzz.workload": {"Request": "SearchedRequest"},
 H+"properties.blocks.tables": {"Request": "RequestRecord"},
 H+"properties.ops.sampling": {"Request": "SampledRow"},
 H+"campaigns.endpoint.parse": {"Entry": "ParsedToken"},
 H+"profiling.gate.baseline": {"Entry": "BaselineEntry"},
 H+"selfcheck.bench.workload": {"Workload": "BenchWorkload"},
 H+"engines.stepping": {"Watcher": "OperationWatcher", "Experts": "ExpertsLoad"},
 H+"selfcheck.faults.trial": {"Trial": "FaultTrial"},
 H+"oracle.trace": {"Trace": "ForwardTrace"},
 H+"formats.checkpoint.tokenizer": {"Tokenizer": "HFTokenizer"},
 H+"profiling.trace.cpu_timeline": {"Timeline": "ThreadTimeline"},
 H+"formats.recording.arguments": {"StepRows": "StepArguments"},
 H+"properties.scheduler.requests": {"Step": "ScheduledStep"},
 H+"properties.ops.rows": {"Rows": "RandomRows"},
 H+"properties.ops.rotary": {"Rotation": "RotaryScheme"},
 H+"campaigns.fuzz.pool": {"Pool": "SequencePool"},
 H+"engines.llamacpp.sequence": {"Piece": "SequencePiece"},
 H+"campaigns.suite.ray_pool": {"Node": "ClusterNode"},
 H+"report.suite.matrix": {"Matrix": "VerdictMatrix", "Cell": "MatrixCell"},
 H+"report.page.heat_map": {"Cell": "HeatCell"},
 H+"base.environment": {"Machine": "MachineInfo"},
 H+"properties.scheduler.limits": {"Limits": "SchedulerLimits"},
 H+"campaigns.endpoint.judge": {"Judgement": "ScheduleJudgement", "Case": "JudgedCompletion"},
 H+"campaigns.fuzz.judge": {"Judge": "WorkloadJudge", "Judgement": "WorkloadJudgement"},
 H+"properties.core.findings": {"Finding": "PropertyFinding"},
 H+"formats.checkpoint.gguf.architecture": {"Family": "GGUFFamily"},
 H+"judge.explain.trial": {"Evidence": "WrongRows"},
 H+"properties.core.determinism": {"Difference": "CallDifference"},
 H+"oracle.decode": {"Decoder": "HFDecoder"},
 H+"cli.command": {"Command": "StrictCommand"},
 H+"results.profile": {"Category": "MemoryCategory"},
 H+"properties.core.adapter": {"Adapter": "NamedAdapter"},
 H+"campaigns.suite.matrix": {"Rule": "CaseRule"},
 H+"selfcheck.properties.attention": {"PagedAttention": "PagedSubject", "ContiguousAttention": "ContiguousSubject", "RecomputeAttention": "RecomputeSubject", "TritonAttention": "TritonSubject"},
 H+"selfcheck.properties.blocks": {"BlockManager": "BlockManagerSubject"},
 H+"selfcheck.properties.scheduler": {"Scheduler": "SchedulerSubject"},
 H+"selfcheck.properties.engine": {"Engine": "EngineSubject"},
}
def module_of(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
files = [Path(f) for f in subprocess.run(["git","ls-files","*.py"],capture_output=True,text=True,check=True).stdout.split() if Path(f).exists()]
modules = {module_of(f): f for f in files}
# re-exports: names that a package's __init__ takes from a renamed module
changed = True
renames = {m: dict(r) for m, r in RENAMES.items()}
for m in list(renames):
    if m not in modules: print("no module", m)
trees = {m: ast.parse(f.read_text()) for m, f in modules.items()}
def resolve(m, node):
    if not node.level: return node.module
    base = m.split(".") if modules[m].name == "__init__.py" else m.split(".")[:-1]
    base = base[:len(base) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)
own = {m: {} for m in modules}   # per file: old -> new to apply
for m, r in renames.items():
    if m in own: own[m].update(r)
while changed:
    changed = False
    for m, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = resolve(m, node)
                for alias in node.names:
                    new = renames.get(source, {}).get(alias.name)
                    if new and own[m].get(alias.name) != new:
                        if alias.asname and alias.asname != alias.name:
                            own[m].setdefault("__import__" + alias.name, new)
                        else:
                            if alias.name in own[m]: print("CLASH", m, alias.name, own[m][alias.name], new)
                            own[m][alias.name] = new
                        renames.setdefault(m, {})[alias.name] = new; changed = True
for m, mapping in own.items():
    if not mapping: continue
    path = modules[m]; text = path.read_text(); tree = trees[m]
    plain = {k: v for k, v in mapping.items() if not k.startswith("__import__")}
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    lines = text.splitlines(keepends=True); out = []
    toks = list(tokenize.generate_tokens(io.StringIO(text).readline))
    edits = []
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    for i, t in enumerate(toks):
        if t.type == tokenize.NAME:
            inside = next((n for n in imports if (n.lineno, n.col_offset) <= t.start and t.end <= (n.end_lineno, n.end_col_offset)), None)
            if inside is not None:
                source = resolve(m, inside)
                new = renames.get(source, {}).get(t.string)
                if new and toks[i-1].string != "as": edits.append((t, new))
            elif t.string in plain and toks[i-1].string != ".":
                if toks[i+1].string == "=" and toks[i-1].string in ("(", ","): continue  # keyword
                edits.append((t, plain[t.string]))
        elif t.type == tokenize.STRING and plain:
            s = t.string
            if len(s) < 90 and not s.startswith(('"""', "'''")) and re.fullmatch(r"""[rbf]*["'][\w\s|\[\],.]*["']""", s):
                n = re.sub(r"(?<![\w.])(" + "|".join(map(re.escape, plain)) + r")\b", lambda x: plain[x[1]], s)
                if n != s and not re.fullmatch(r"""[rbf]*["'][A-Z]\w*( \w+)+["']""", s): edits.append((t, n))
            else:
                n = re.sub(r"`(" + "|".join(map(re.escape, plain)) + r")([`.])", lambda x: f"`{plain[x[1]]}{x[2]}", s)
                if n != s: edits.append((t, n))
    for t, new in sorted(edits, key=lambda e: e[0].start, reverse=True):
        (a, b), (c, d) = t.start, t.end
        if a == c: lines[a-1] = lines[a-1][:b] + new + lines[a-1][d:]
        else:
            whole = "".join(lines[a-1:c]); head = lines[a-1][:b]; tail = lines[c-1][d:]
            lines[a-1:c] = (head + new + tail).splitlines(keepends=True)
    path.write_text("".join(lines))
# dotted mentions "module:Class" and harness.x.Class
pairs = {f"{m}:{o}": f"{m}:{n}" for m, r in RENAMES.items() for o, n in r.items()} | {f"{m}.{o}": f"{m}.{n}" for m, r in RENAMES.items() for o, n in r.items()}
rx = re.compile("|".join(re.escape(k) + r"\b" for k in pairs))
for f in subprocess.run(["git","ls-files"],capture_output=True,text=True,check=True).stdout.split():
    p = Path(f)
    if not p.exists() or p.suffix not in {".py",".md",".toml",".sh"} or f.startswith("reports/") or f=="CHANGELOG.md": continue
    t = p.read_text(); n = rx.sub(lambda x: pairs[x[0]], t)
    if n != t: p.write_text(n)
