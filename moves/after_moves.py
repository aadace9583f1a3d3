from pathlib import Path
import re
def edit(f, *pairs):
    p=Path(f); t=p.read_text()
    for a,b in pairs:
        if a not in t: print("NOT FOUND", f, a[:60]); continue
        t=t.replace(a,b)
    p.write_text(t)
edit("harness/formats/checkpoint/locations.py",("Path(__file__).parents[1]\n","Path(__file__).parents[2]\n"))
edit("harness/report/page/html.py",('parent / "page" / "template"','parent / "template"'))
edit("tests/unit/report/test_terminal.py",('f"harness.report.{form}"','f"harness.report.check.{form}"'))
edit("tests/benchmarks/systematic_floors.py",('''        f"Statistics are absolute. An effect alarms if its statistic is at least {THRESHOLD:g} and its size above "
        "the floor of its kind (`harness/judge/compare/systematic.py`). The last column: largest size, in roundings, of "
        "those beyond the threshold.",''','''        f"Statistics are absolute. An effect alarms if its statistic is at least {THRESHOLD:g} and its size above "
        "the floor of its kind (`harness/judge/compare/systematic.py`). "
        "The last column: largest size, in roundings, of those beyond the threshold.",'''))
p=Path("pyproject.toml"); t=p.read_text()
a=t.index('layers = [\n    "cli |'); b=t.index(']\nexhaustive', a)
print(t[a:b])
t=t[:a]+'''layers = [
    "cli | pytest_plugin",
    "api",
    "(campaigns) | (selfcheck)",
    "judge | (profiling) | (properties)",
    "plan",
    "report | engines",
    "oracle",
    "formats",
    "results",
    "base",
    "errors | version",
'''+t[b:]
t=t.replace('''layers = [
    "reference",
    "(scheduler)''','''layers = [
    "(scheduler)''').replace('name = "The property suites: adapters of the reference engine above the suites, what all share below"','name = "The property suites: what all share stands below them"')
p.write_text(t)
p=Path("tests/mutation/subjects.py"); t=p.read_text()
edit("tests/mutation/subjects.py",
('''_DEFAULT = {
    "compare"''','''_ROOMS = {"compare": "judge/compare", "explain": "judge/explain", "oracle": "oracle", "recording": "formats/recording"}
"""Where the packages are that mutants are drawn from, and their tests."""
_DEFAULT = {
    "compare"'''),
)
p=Path("tests/mutation/subjects.py"); t=p.read_text()
a=t.index("def files_of_tests"); tail=t[t.index("LISTED_ONLY = "):]
t=t[:a]+'''def files_of_tests(path: str, *, all_tests: bool) -> tuple[str, ...]:
    """Return the tests of a file that is mutated, both below the root of the checkout."""
    stem = path.removesuffix(".py")
    if stem.startswith("reference_engine/"):
        names = _ENGINE[stem.removeprefix("reference_engine/")]
        return tuple(f"tests/unit/reference_engine/{name}" for name in names)
    package, room = next(each for each in _ROOMS.items() if stem.startswith(f"harness/{each[1]}/"))
    inner = stem.removeprefix(f"harness/{room}/")
    folder, _, module = inner.rpartition("/")
    if folder:  # a package in a package is tested in one file
        module = folder
    if package == "recording":
        own = _RECORDING_OWN.get(module, (f"recording/test_{module}.py",))
        files = (f"tests/unit/formats/{name}" for name in (*own, *_RECORDING))
        return tuple(file for file in files if (ROOT / file).is_file())
    if all_tests:
        return (f"tests/unit/{room}",)
    has_own = (ROOT / "tests" / "unit" / room / f"test_{module}.py").is_file()
    by_default = _OTHERS.get(f"{package}/{module}", (f"test_{module}.py",) if has_own else _DEFAULT[package])
    return tuple(f"tests/unit/{room}/{name}" for name in _OTHERS.get(f"{package}/{inner}", by_default))


def subjects() -> list[str]:
    """Return the files that mutants are drawn from, below the root of the checkout."""
    paths = [path for room in _ROOMS.values() for path in sorted((ROOT / "harness" / room).rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in paths if path.stem != "__init__"]
    return [*found, *(f"reference_engine/{name}.py" for name in _ENGINE if name not in LISTED_ONLY)]


'''+tail
t=t.replace('"../explain/test_rotary.py"','"../judge/explain/test_rotary.py"')
p.write_text(t)
edit("tests/integration/processes.py",("import harness.api.calls, harness.campaigns.fuzz.run, harness.judge.jobs.check, harness.profiling.job, harness.report.page.html","import harness.api.calls, harness.campaigns.fuzz.run, harness.judge.jobs.check\nimport harness.profiling.job, harness.report.page.html"))
