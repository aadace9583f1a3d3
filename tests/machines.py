"""python -m tests.machines: the default suite under settings that stand for other machines, and what failed.

A result is kept by the name of its setting, so that a run that was ended goes on with `--only`. The table is that
of all kept results.
"""

import argparse
import datetime
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
HIDING = Path(__file__).parent / "hidden_packages"
"""A folder of PYTHONPATH whose `sitecustomize` hides packages from every Python process."""
COMPILERS = ("c++", "cc", "clang*", "gcc*", "g++*", "*-gcc", "*-g++", "*-gcc-[0-9]*", "*-g++-[0-9]*")
PACKAGES = ("llama_cpp", "gguf", "ray", "compressed_tensors", "torchao", "peft", "llguidance")
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait do not keep a core: with more threads than cores, each barrier costs a slice of time otherwise."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What another machine has that this one has not, or the other way round."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Of pytest."""
    packages: tuple[str, ...] = ()
    """Packages that have to be there."""
    programs: tuple[str, ...] = ()
    """Programs that have to be there."""
    processor_flag: str = ""
    """What the processor has to know, as Linux names it."""
    hidden_packages: tuple[str, ...] = ()
    hidden_programs: tuple[str, ...] = ()
    """Patterns of file names."""
    num_busy_processes: int = 0
    is_daily: bool = True
    """CI may choose it: it takes about as long as the plain run, or twice as long."""


SETTINGS = (
    Setting(name="plain"),
    Setting(name="aten-default", environment={"ATEN_CPU_CAPABILITY": "default"}),
    Setting(name="aten-avx2", environment={"ATEN_CPU_CAPABILITY": "avx2"}, processor_flag="avx2"),
    Setting(name="aten-avx512", environment={"ATEN_CPU_CAPABILITY": "avx512"}, processor_flag="avx512f"),
    Setting(name="mkl-sse4_2", environment={"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Setting(name="mkl-avx2", environment={"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, processor_flag="avx2"),
    Setting(name="mkl-compatible", environment={"MKL_CBWR": "COMPATIBLE"}),
    Setting(name="mkl-avx2-strict", environment={"MKL_CBWR": "AVX2,STRICT"}, processor_flag="avx2"),
    Setting(name="onednn-sse41", environment={"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Setting(name="onednn-avx2", environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Setting(name="onednn-avx512", environment={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    Setting(
        name="least-instructions",
        environment={
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        },
    ),
    Setting(name="other-kernels", arguments=("-p", "tests.other_kernels"), is_daily=False),
    Setting(name="threads-1", environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
    Setting(name="threads-2", environment={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}),
    Setting(name="threads-3", environment={"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", **SLEEPING}),
    Setting(name="workers-2", arguments=("-n", "2")),
    Setting(name="workers-4", arguments=("-n", "4")),
    Setting(name="load-20", num_busy_processes=20, is_daily=False),
    Setting(name="hash-seed-1", environment={"PYTHONHASHSEED": "1"}),
    Setting(name="hash-seed-2", environment={"PYTHONHASHSEED": "4242"}),
    Setting(name="shuffled-1", arguments=("--random-order-bucket=module", "--random-order-seed=1")),
    Setting(name="shuffled-2", arguments=("--random-order-bucket=package", "--random-order-seed=2")),
    Setting(name="without-packages", hidden_packages=PACKAGES),
    Setting(name="without-programs", hidden_programs=("chromium*", "*ctags*")),
    Setting(name="without-compilers", hidden_programs=COMPILERS),
    Setting(name="with-everything", packages=PACKAGES, programs=("chromium", "ctags", "g++"), is_daily=False),
)


def missing(setting: Setting) -> list[str]:
    """Return what a setting needs that this machine has not."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if setting.processor_flag else [""]
    return [
        *(f"package {name}" for name in setting.packages if find_spec(name) is None),
        *(f"program {name}" for name in setting.programs if shutil.which(name) is None),
        *([] if setting.processor_flag in flags else [f"processor with {setting.processor_flag}"]),
    ]


def setting_of_the_day(day: datetime.date) -> Setting:
    """Return the setting that CI runs on a day beside the plain run."""
    daily = [setting for setting in SETTINGS if setting.is_daily and setting.name != "plain" and not missing(setting)]
    return daily[day.toordinal() % len(daily)]


def path_without(patterns: Sequence[str], folder: Path) -> str:
    """Return PATH without the programs of some names: a folder that has one gives way to links to its other files."""
    folders = []
    for number, name in enumerate(dict.fromkeys(os.environ["PATH"].split(os.pathsep))):
        files = list(Path(name).iterdir()) if Path(name).is_dir() else []
        kept = [path for path in files if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)]
        if len(kept) < len(files):
            name = str(folder / f"path-{number}")
            Path(name).mkdir()
            for path in kept:
                (Path(name) / path.name).symlink_to(path)
        folders.append(name)
    return os.pathsep.join(folders)


def environment_of(setting: Setting, folder: Path) -> dict[str, str]:
    """Return the variables of a setting; caches are new where the suite would find what another setting made."""
    environment = {**os.environ, **setting.environment}
    if setting.hidden_packages:
        environment["HIDDEN_PACKAGES"] = ",".join(setting.hidden_packages)
        environment["PYTHONPATH"] = os.pathsep.join([str(HIDING), *filter(None, [os.environ.get("PYTHONPATH")])])
    if setting.hidden_programs:
        environment["PATH"] = path_without(setting.hidden_programs, folder)
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
        environment.pop("CXX", None)
    return environment


@contextmanager
def load_of(num_processes: int) -> Iterator[None]:
    """Keep some processes busy; they also end when this one does."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the suite came to under a setting."""

    setting: str
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    status: int = 0
    """Of pytest."""
    seconds: float = 0.0
    arguments: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """Why it was not run."""

    @property
    def is_green(self) -> bool:
        """Whether tests passed and none failed."""
        return not self.lacks and self.status == 0 and self.passed > 0


def run_suite(setting: Setting, arguments: Sequence[str], out: Path) -> Result:
    """Run the suite under a setting, with its output in a file."""
    lacks = missing(setting)
    if lacks:
        return Result(setting=setting.name, lacks=tuple(lacks))
    report, begin = out / f"{setting.name}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *arguments, *setting.arguments, f"--junitxml={report}"]
    with (
        tempfile.TemporaryDirectory(prefix="machines-") as folder,
        load_of(setting.num_busy_processes),
        (out / f"{setting.name}.log").open("wb") as log,
    ):
        environment = environment_of(setting, Path(folder))
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    counts = read_report(report) if report.exists() else {}
    seconds = time.monotonic() - begin
    return Result(setting=setting.name, status=ran.returncode, seconds=seconds, arguments=tuple(arguments), **counts)


def read_report(path: Path) -> dict[str, object]:
    """Return the counts of pytest's report in JUnit's form, and the names of what failed."""
    cases = list(ET.parse(path).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "failed": tuple(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed)),
        "skipped": len(skipped),
        "passed": len(cases) - len(failed) - len(skipped),
    }


def table(results: Sequence[Result]) -> str:
    """Return the results as Markdown, and below the table what failed."""
    rows = [
        [
            result.setting,
            result.passed,
            result.skipped,
            len(result.failed),
            f"{result.seconds:.0f}",
            f"not run: no {', no '.join(result.lacks)}" if result.lacks else result.status,
            " ".join(result.arguments),
        ]
        for result in results
    ]
    headers = ["setting", "passed", "skipped", "failed", "seconds", "status of pytest", "arguments"]
    lines = [f"- {result.setting}: {name}" for result in results for name in result.failed]
    return "\n".join(
        [tabulate(rows, headers, tablefmt="github", disable_numparse=True), *([""] if lines else []), *lines]
    )


def kept_results(out: Path) -> list[Result]:
    """Return the results of this run and of earlier ones, in the order of the settings."""
    paths = [out / f"{setting.name}.json" for setting in SETTINGS]
    return [Result(**json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def main() -> int:
    """Run the suite under the chosen settings; print and write the table after each."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="a setting [default: all]")
    parser.add_argument("--of-the-day", action="store_true", help="the setting that CI takes today")
    parser.add_argument("--list", action="store_true", help="print the settings and run none")
    parser.add_argument("--out", type=Path, default=ROOT / "reports/runs/machines", help="where results are kept")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of pytest, after --")
    options = parser.parse_args()
    only = [setting_of_the_day(datetime.date.today()).name] if options.of_the_day else options.only or names
    chosen = [setting for setting in SETTINGS if setting.name in only]
    if options.list:
        print(*(setting.name for setting in chosen), sep="\n")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for setting in chosen:
        print(f"{setting.name} ...", flush=True)
        results.append(run_suite(setting, options.arguments, options.out))
        (options.out / f"{setting.name}.json").write_text(json.dumps(asdict(results[-1])), encoding="utf-8")
        (options.out / "table.md").write_text(table(kept_results(options.out)) + "\n", encoding="utf-8")
        print(table(results[-1:]), flush=True)
        if not results[-1].is_green and not results[-1].lacks:
            print(*(options.out / f"{setting.name}.log").read_text(errors="replace").splitlines()[-100:], sep="\n")
    ran = [result for result in results if not result.lacks]
    return 0 if ran and all(item.is_green for item in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
