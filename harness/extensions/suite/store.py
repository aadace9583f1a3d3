"""A store by content: files under their sha256, in a folder or under any URL that fsspec knows (S3, GCS, ...).

Goldens travel through it from one machine's cache to another's. A file that is read is held to its digest, so that a
copy that was cut off or altered on its way is never used. A store that fails is asked again until its user's patience
ends.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError
from harness.extensions.suite.task import StoredGolden
from harness.formats.checkpoint import cache_dir

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_T = TypeVar("_T")


class DamagedBlobError(Exception):
    """A store holds other content than the digest's, or nothing."""


class Store:
    """Files by content."""

    def __init__(self, url: str, *, patience_s: float = 60.0) -> None:
        """Use the store at a folder or URL.

        One file may fail for `patience_s` until it is given up.

        Raises:
            HarnessError: STORE_FAILED: no protocol of that name is installed.
        """
        from fsspec.core import url_to_fs

        self.url, self._patience_s = url, patience_s
        try:
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            hint = "a folder, or the package of the protocol: s3fs, gcsfs, ..."
            raise HarnessError(Code.STORE_FAILED, f"the store cannot be used: {error}", where=url, hint=hint) from error
        self._is_local = "file" in _protocols(self._files)

    def check(self) -> None:
        """Write a file, read it back and take it away.

        Raises:
            HarnessError: STORE_FAILED: the store is read-only, full, or not to be reached.
        """
        content = uuid.uuid4().bytes
        try:
            path = f"{self._root}/probe-{content.hex()}"
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(path, content)
            back = self._files.cat_file(path)
            self._files.rm_file(path)
        except Exception as error:  # every protocol has errors of its own
            raise _failed(self.url, "cannot be written and read", error) from error
        if back != content:
            raise _failed(self.url, "gives back other bytes than it was given", None)

    def put(self, source: Path) -> str:
        """Store a file and return its digest; a file that is there already is not written again.

        Raises:
            HarnessError: STORE_FAILED, after all patience.
        """
        digest, size = digest_of(source), source.stat().st_size
        self._patiently("written", digest, lambda: self._put(source, digest, size))
        return digest

    def get(self, digest: str, target: Path) -> None:
        """Copy the file of that digest to `target`.

        Raises:
            DamagedBlobError: it is not there, or is another one; what is another one is taken out of the store.
            HarnessError: STORE_FAILED, after all patience.
        """
        self._patiently("read", digest, lambda: self._get(digest, target))

    def _put(self, source: Path, digest: str, size: int) -> None:
        path = self._path(digest)
        if self._files.exists(path) and self._files.size(path) == size:
            return
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not self._is_local:  # an object appears whole, or not at all
            self._files.put_file(str(source), path)
            return
        beside = f"{path}.{uuid.uuid4().hex}"
        try:
            self._files.put_file(str(source), beside)
            Path(beside).replace(path)
        finally:
            with suppress(OSError):
                Path(beside).unlink()

    def _get(self, digest: str, target: Path) -> None:
        path = self._path(digest)
        try:
            self._files.get_file(path, str(target))
        except FileNotFoundError as error:
            if not self._files.exists(self._root):  # a mount that is away for a while
                raise OSError(f"there is no {self._root}") from error
            raise DamagedBlobError(f"the store has no {digest}") from error
        if (actual := digest_of(target)) != digest:
            target.unlink()
            with suppress(Exception):
                self._files.rm_file(path)
            raise DamagedBlobError(f"the store's {digest} arrived as {actual}")

    def _path(self, digest: str) -> str:
        return f"{self._root}/blobs/{digest[:2]}/{digest}"

    def _patiently(self, doing: str, digest: str, act: Callable[[], _T]) -> _T:
        """Act until it succeeds or patience is over; each wait is twice the one before."""
        give_up, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        while True:
            try:
                return act()
            except DamagedBlobError:
                raise
            except Exception as error:  # every protocol has errors of its own
                if time.monotonic() + wait_s > give_up:
                    raise _failed(f"{self.url}: {digest}", f"could not be {doing} in time", error) from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def digest_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _failed(where: str, what: str, error: Exception | None) -> HarnessError:
    reason = "" if error is None else f": {type(error).__name__}: {error}"
    hint = "see that it can be written from every machine, and has space; then run again with --resume"
    return HarnessError(Code.STORE_FAILED, f"the store {what}{reason}", where=where, hint=hint)


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
