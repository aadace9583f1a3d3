"""python -m tests.fuzz [--inputs N] [--seed S] [TARGET ...]: many damaged inputs, and how many were handled badly."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from .exchanges import exchanges
from .fuzzer import fuzz
from .targets import Templates, targets


def main() -> int:
    """Fuzz every target in proportion to what its inputs cost; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="damaged inputs in all [default: 100,000]")
    parser.add_argument("--seed", type=int, default=0, help="of the first input")
    parser.add_argument("names", nargs="*", metavar="TARGET", help="[default: all]")
    options = parser.parse_args()
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, ExitStack() as stack:
        (Path(folder) / "template").mkdir()
        templates = Templates(Path(folder) / "template")
        files = {
            target.name: (partial(fuzz, target, templates.folder), target.seconds) for target in targets(templates)
        }
        messages = {message.name: (message.fuzz, message.seconds) for message in stack.enter_context(exchanges())}
        chosen = {
            name: target for name, target in (files | messages).items() if not options.names or name in options.names
        }
        shares = {name: 1 / seconds for name, (_, seconds) in chosen.items()}
        for name, (handle, _) in chosen.items():
            count, begin = max(1, round(options.inputs * shares[name] / sum(shares.values()))), time.monotonic()
            handled = [handle(options.seed + index) for index in range(count)]
            violations = [what for item in handled for what in item.violations]
            num_bad += len(violations)
            endings = ", ".join(f"{ending} {n}" for ending, n in Counter(item.ending for item in handled).most_common())
            seconds = time.monotonic() - begin
            print(f"{name}: {count} inputs, {len(violations)} violations, {seconds:.0f} s ({endings})", flush=True)
            print(*violations[:10], sep="\n", end="\n" if violations else "", flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
