"""A suite of short cases on Ray nodes of this machine: overhead a case, scaling, and what a kill in the middle does.

    python tests/benchmarks/suite_on_ray.py --nodes 4 --cases 1000
    python tests/benchmarks/suite_on_ray.py --nodes 4 --cases 1000 --kill node
    python tests/benchmarks/suite_on_ray.py --nodes 4 --cases 1000 --kill driver
    python tests/benchmarks/suite_on_ray.py --nodes 4 --cases 32 --sleep 5

Every node has one CPU and a cache of its own, so that goldens travel through the store. With `--sleep` the engine waits
for so many seconds in each case, as one does that runs on a GPU: what is left is the suite's own scaling.
"""

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL_STORE = 80 << 20
HARNESS = [sys.executable, "-c", "from harness.cli import main; main()"]
ENGINE = """
import os, time
from harness.engines import open_engine as open_any


class Engine:
    name = "sleepy"

    def __init__(self, inner):
        self.inner, self.capabilities = inner, inner.capabilities

    def run(self, workload, writer):
        time.sleep(float(os.environ["SLEEPY_SECONDS"]))
        self.inner.run(workload, writer)


def open_engine(folder, *, dtype, device, options):
    return Engine(open_any("reference", folder, dtype=dtype, device=device, options=options))
"""


def write_matrix(folder: Path, num_cases: int, *, sleeps: bool) -> Path:
    """Write a matrix of two models, two engines and 25 schedules; prompts make up the number."""
    engines = ["sleepy"] if sleeps else ["reference", "hf"]
    sizes = range(2, 2 + min(25, num_cases // (2 * len(engines))))
    num_prompts = max(1, num_cases // (2 * len(engines) * len(sizes)))
    draw = random.Random(0)
    lines = ['model = ["qwen3-tiny", "llama-tiny"]', 'dtype = ["float32"]', f"engine = {json.dumps(engines)}"]
    lines.append(f"schedule = {json.dumps([f'chunked:{size}' for size in sizes])}")
    for at in range(num_prompts):
        token_ids = [draw.randrange(3, 200) for _ in range(30)]
        lines += [f"[prompts.p{at}]", f"requests = [{{token_ids = {token_ids}}}]", "max_new_tokens = 2"]
    path = folder / "matrix.toml"
    path.write_text("\n".join(lines))
    return path


def install_engine(folder: Path) -> None:
    """Put the waiting engine where Python finds it, as pip does."""
    metadata = folder / "sleepy-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sleepy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[inference_harness.engines]\nsleepy = sleepy_engine:open_engine\n")
    (folder / "sleepy_engine.py").write_text(ENGINE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def num_done(out: Path) -> int:
    try:
        return (out / "journal.jsonl").read_bytes().count(b'"record": "case"')
    except OSError:
        return 0


def wait_for(out: Path, number: int, process: "subprocess.Popen[bytes]") -> None:
    while num_done(out) < number and process.poll() is None:
        time.sleep(0.05)


def kill_node(cluster: Any, add_node: Any, nodes: list[Any], out: Path, process: "subprocess.Popen[bytes]") -> None:
    """Kill a node, and add another one when 20 more cases have ended."""
    before, begin = num_done(out), time.monotonic()
    cluster.remove_node(nodes[-1], allow_graceful=False)
    wait_for(out, before + 20, process)
    print(f"20 more cases had ended {time.monotonic() - begin:.1f} s after the kill")
    add_node()
    print("a new node, with an empty cache, was added")


def busy_worker(node: Any) -> int:
    """Return the process of Ray's that runs a task on a node, among the children of the node's raylet."""
    raylet = Path(f"/proc/{node.all_processes['raylet'][0].process.pid}/task")
    while True:
        for pid in " ".join(file.read_text() for file in raylet.glob("*/children")).split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::matrix"):  # titled as its task
                return int(pid)
        time.sleep(0.01)


def summary(document: dict[str, Any]) -> None:
    """Print what a suite cost."""
    cases = [case for case in document["cases"] if case["seconds"] and case["handed_over_s"]]
    busy = sum(case["seconds"] for case in cases)
    added = sorted(1000 * (case["handed_over_s"] - case["seconds"]) for case in cases)
    idle = document["elapsed_s"] * document["num_workers"] - busy - document["golden_s"]
    print(f"counts {document['counts']}, resumed {document['num_resumed']}, goldens {document['num_goldens']}")
    print(f"attempts {dict(collections.Counter(case['attempts'] for case in document['cases']))}")
    print(f"elapsed {document['elapsed_s']:.1f} s, {len(document['cases']) / document['elapsed_s']:.2f} cases/s")
    print(f"check, median {1000 * statistics.median(case['seconds'] for case in cases):.0f} ms")
    quantiles = [added[int(share * (len(added) - 1))] for share in (0.5, 0.9, 0.99, 1)]
    print("added by handing over, ms: median {:.1f}, p90 {:.1f}, p99 {:.1f}, max {:.0f}".format(*quantiles))
    if not document["num_resumed"]:
        print(f"all that is neither check nor golden: {1000 * idle / len(cases):.0f} ms a case and worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--kill", choices=["node", "worker", "driver"])
    parser.add_argument("--at", type=int, default=100, help="cases that have ended when the kill comes")
    parser.add_argument("--sleep", type=float, default=0.0)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if arguments.sleep:
            os.environ["SLEEPY_SECONDS"] = str(arguments.sleep)
            install_engine(folder / "site")
        run(arguments, folder, write_matrix(folder, arguments.cases, sleeps=bool(arguments.sleep)))


def run(arguments: argparse.Namespace, folder: Path, matrix: Path) -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": SMALL_STORE, "include_dashboard": False}
    cluster, out = Cluster(initialize_head=True, head_node_args=head), folder / "out"

    def add_node() -> Any:
        cache = str(folder / f"cache-{time.time_ns()}")
        return cluster.add_node(num_cpus=1, object_store_memory=SMALL_STORE, env_vars={"HARNESS_CACHE": cache})

    nodes = [add_node() for _ in range(arguments.nodes)]
    command = [*HARNESS, "suite", "--matrix", str(matrix), "--ray", cluster.address, "--out", str(out)]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if arguments.kill:
        wait_for(out, arguments.at, process)
        print(f"{num_done(out)} cases had ended after {time.monotonic() - begin:.1f} s: the {arguments.kill} is killed")
    if arguments.kill == "node":
        kill_node(cluster, add_node, nodes, out, process)
    elif arguments.kill == "worker":
        os.kill(busy_worker(nodes[-1]), signal.SIGKILL)
    elif arguments.kill == "driver":
        process.kill()
        process.wait()
        done, again = num_done(out), time.monotonic()
        process = subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL)
        wait_for(out, done + 1, process)
        print(f"{done} cases were done; the first new one ended {time.monotonic() - again:.1f} s after the restart")
    print(
        f"exit status {process.wait()} after {time.monotonic() - begin:.1f} s; {num_done(out)} results in the journal"
    )
    summary(json.loads((out / "suite.json").read_text()))
    cluster.shutdown()


if __name__ == "__main__":
    main()
