"""Properties of the loader of weights: shards are the same as one file, and damage is refused, not a crash."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from safetensors.torch import load_file, save_file

from harness.base.files import scratch_folder
from harness.formats.safetensors_header import LENGTH_BYTES, read_header
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections, raise_all
from harness.properties.ops.adapter import OpsUnderTest

FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Damage:
    """One change to the bytes of a file."""

    at: int
    replaced: int
    """Bytes that go."""
    by: bytes

    def done_to(self, data: bytes) -> bytes:
        """Return the damaged bytes."""
        return data[: self.at] + self.by + data[self.at + self.replaced :]


def check_loader(named: Any, settings: Settings) -> Rejections:
    """Check that shards load like one file, and that damage is refused with a message; nothing without `load`.

    Raises:
        PropertyError: they do not, or it is not.
    """
    target = OpsUnderTest(named)
    if not target.offers("load") or target.declares("checkpoint") is None:
        return Rejections()
    source = Path(target.declares("checkpoint"))
    header = read_header(source / FILE)
    names = sorted(entry.name for entry in header.tensors)
    tensors, expected = load_file(source / FILE), target.adapter.load(source)
    few = Settings(settings, max_examples=max(10, settings.max_examples // 4))
    shards = partial(
        falsify,
        "shards hold what one file holds",
        lambda parts: _check_shards(target, source, tensors, expected, parts),
        st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)),
        few,
    )
    damage = partial(
        falsify,
        "a damaged header is refused",
        lambda damage: _check_damage(target, source, damage),
        _damages(header.data_offset, header.file_bytes),
        settings,
    )
    return raise_all([shards, damage])


def _check_shards(
    target: OpsUnderTest,
    source: Path,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    parts: list[int],
) -> None:
    shard_of = dict(zip(sorted(tensors), parts, strict=True))
    program = "\n".join([*_opening(target), *_shard_lines(shard_of), *_ENDING]) + "\n"
    with _copy(source) as folder:
        (folder / FILE).unlink()
        files = {name: f"shard-{part}.safetensors" for name, part in shard_of.items()}
        for file in sorted(set(files.values())):
            save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
        (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
        with calling("load", lambda: program):
            loaded = target.adapter.load(folder)
        wrong = sorted(loaded.keys() ^ expected.keys()) or [
            name for name in sorted(loaded) if not torch.equal(loaded[name], expected[name])
        ]
    if wrong:
        raise Counterexample(f"{wrong[0]} is not what one file gives", program)


def _check_damage(target: OpsUnderTest, source: Path, damage: Damage) -> None:
    refusals = tuple(target.declares("load_errors", (ValueError, OSError)))
    with _copy(source) as folder:
        (folder / FILE).write_bytes(damage.done_to((source / FILE).read_bytes()))
        try:
            target.adapter.load(folder)
        except refusals:
            return
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            lines = [
                f'path = folder / "{FILE}"',
                "data = path.read_bytes()",
                f"path.write_bytes(data[:{damage.at}] + {damage.by!r} + data[{damage.at + damage.replaced}:])",
                f"{target.name}.load(folder)  # raises",
            ]
            what = (
                f"load crashed: {type(error).__name__}: {error}, expected {' or '.join(e.__name__ for e in refusals)}"
            )
            raise Counterexample(what, "\n".join([*_opening(target), *lines]) + "\n") from error


@contextmanager
def _copy(source: Path) -> Iterator[Path]:
    """Yield a folder with the checkpoint's files in it."""
    with scratch_folder("harness-") as scratch:
        folder = scratch / "checkpoint"
        shutil.copytree(source, folder)
        yield folder


def _opening(target: OpsUnderTest) -> list[str]:
    return [
        "import shutil",
        "import tempfile",
        "from pathlib import Path",
        *target.opening(),
        "",
        'folder = Path(tempfile.mkdtemp()) / "checkpoint"',
        f"shutil.copytree({target.name}.checkpoint, folder)",
    ]


def _shard_lines(shard_of: Mapping[str, int]) -> list[str]:
    return [
        "import json",
        "from safetensors.torch import load_file, save_file",
        "",
        f'tensors = load_file(folder / "{FILE}")',
        f'(folder / "{FILE}").unlink()',
        f"shard_of = dict(zip(sorted(tensors), {list(shard_of.values())}))",
        'files = {name: f"shard-{part}.safetensors" for name, part in shard_of.items()}',
        "for file in sorted(set(files.values())):",
        "    save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)",
        f'(folder / "{FILE}.index.json").write_text(json.dumps({{"weight_map": files}}))',
    ]


_ENDING = [
    "sharded, single = ops.load(folder), ops.load(ops.checkpoint)",
    "assert sharded.keys() == single.keys()",
    "assert all((sharded[name] == single[name]).all() for name in single)",
]


@st.composite
def _damages(draw: DrawFn, data_offset: int, file_bytes: int) -> Damage:
    kind = draw(st.sampled_from(("replace", "cut out", "insert", "length", "truncate")))
    if kind == "length":
        length = draw(st.integers(0, 2**64 - 1) | st.integers(0, 2 * file_bytes))
        return Damage(0, LENGTH_BYTES, length.to_bytes(LENGTH_BYTES, "little"))
    if kind == "truncate":
        at = draw(st.integers(0, 2 * LENGTH_BYTES) | st.integers(0, data_offset) | st.integers(0, file_bytes - 1))
        return Damage(at, file_bytes - at, b"")
    at = draw(st.integers(LENGTH_BYTES, data_offset - 1))
    number = draw(st.integers(1, 4))
    # Digits and punctuation damage what the JSON says; other bytes damage the JSON.
    by = draw(
        st.binary(min_size=number, max_size=number)
        | st.text('0123456789[]{},:"-e', min_size=1, max_size=4).map(lambda text: text.encode())
    )
    if kind == "cut out":
        return Damage(at, number, b"")
    return Damage(at, len(by) if kind == "replace" else 0, by)
