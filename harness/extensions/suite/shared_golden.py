"""A golden on its way between machines: from the cache it was made in into the store, and out of it into another."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError
from harness.extensions.suite.store import DamagedBlobError, Store
from harness.extensions.suite.task import StoredGolden
from harness.formats.checkpoint import cache_dir


def share_golden(folder: Path, store: Store) -> StoredGolden:
    """Put a golden's files into the store, and the list of them.

    Raises:
        HarnessError: STORE_FAILED.
    """
    files = {path.name: store.put(path) for path in sorted(folder.iterdir()) if path.is_file()}
    with scratch_folder("harness-") as scratch:
        index = scratch / "index.json"
        index.write_text(json.dumps(files, sort_keys=True), encoding="utf-8")
        return StoredGolden(name=folder.name, index=store.put(index))


def fetch_goldens(goldens: Sequence[StoredGolden], store: Store) -> None:
    """Put goldens into this machine's cache if they are not there already.

    Raises:
        DamagedBlobError: a file is not in the store any more, or is another one.
        HarnessError: STORE_FAILED; CANNOT_WRITE.
    """
    for golden in goldens:
        place = cache_dir() / "goldens" / golden.name
        if place.exists():
            continue  # the check that uses it sees that it is whole
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(".fetching-", place.parent) as scratch:
                folder = scratch / "golden"
                folder.mkdir()
                for name, digest in _index(golden, store, scratch).items():
                    store.get(digest, folder / name)
                with suppress(OSError):  # another process was faster: its golden is the same
                    folder.rename(place)
        except OSError as error:
            what = f"the golden cannot be cached: {error.strerror or error}"
            raise HarnessError(Code.CANNOT_WRITE, what, where=place, hint="set HARNESS_CACHE") from error


def _index(golden: StoredGolden, store: Store, scratch: Path) -> dict[str, str]:
    path = scratch / "index.json"
    store.get(golden.index, path)
    files: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    if any(Path(name).name != name for name in files):
        raise DamagedBlobError(f"the index {golden.index} names files outside of the golden")
    return files
