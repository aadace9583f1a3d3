"""Memory snapshots, and changes between two, for a terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.errors import printable
from harness.report.terminal import fitted_table
from harness.results.memory import (
    DeviceMemory,
    MemoryDiff,
    MemoryMoment,
    MemoryNode,
    MemoryPlace,
    MemorySummary,
    OutOfMemory,
    PlaceChange,
    StepGrowth,
)

_MOST_ROWS = 12
_LEAST_SHARE = 0.01
"""Of all that lives, for a call to have a row."""
_UNKNOWN = "none of them"
PLACE_HEADERS = ("place", "operation", "category", "blocks", "MiB")
_DISPENSABLE = ("category", "blocks", "operation")


def memory_text(summaries: Sequence[MemorySummary], *, width: int | None = None) -> str:
    """Return one block a device."""
    blocks = [block for summary in summaries for device in summary.devices for block in _device(summary, device, width)]
    return printable("\n\n".join(blocks), keeps_lines=True)


def memory_diff_text(diff: MemoryDiff, *, width: int | None = None) -> str:
    """Return the change of each place, now and at the peak."""
    parts = [f"before: {diff.before.file}\nafter:  {diff.after.file}"]
    for title, changes in (("in use", diff.now), ("at the peak", diff.at_peak)):
        parts.append(f"{title}: {_mib(sum(change.added_bytes for change in changes), signed=True)} MiB")
        parts += [_changes(changes, width)] if changes else []
    return printable("\n\n".join(parts), keeps_lines=True)


def moments_text(moments: Sequence[MemoryMoment], *, width: int | None = None) -> str:
    """Return one tree a device."""
    return printable("\n\n".join(_moment(moment, width) for moment in moments), keeps_lines=True)


def _moment(moment: MemoryMoment, width: int | None) -> str:
    root = moment.root
    head = f"{device_name(moment)} at {moment.at_ms:,.3f} ms: {_mib(root.num_bytes)} MiB in {root.num_blocks:,} blocks"
    rows = list(_branches(root, 0, _LEAST_SHARE * root.num_bytes))
    return f"{head}\n{fitted_table(rows, ['call', 'blocks', 'MiB'], width=width)}" if rows else head


def _branches(node: MemoryNode, depth: int, least_bytes: float) -> Iterator[list[str]]:
    """Yield a row for each call; a call that makes one only, of the same blocks, stands for both."""
    children = sorted(node.children.values(), key=lambda child: -child.num_bytes)
    for child in children:
        while len(child.children) == 1 and next(iter(child.children.values())).num_blocks == child.num_blocks:
            child = next(iter(child.children.values()))
        if child.num_bytes >= least_bytes:
            yield ["  " * depth + child.name, f"{child.num_blocks:,}", _mib(child.num_bytes)]
            yield from _branches(child, depth + 1, least_bytes)
    small = [child for child in children if child.num_bytes < least_bytes]
    if small:
        sizes = sum(child.num_blocks for child in small), sum(child.num_bytes for child in small)
        yield ["  " * depth + f"{len(small):,} smaller calls", f"{sizes[0]:,}", _mib(sizes[1])]


def device_name(device: DeviceMemory | MemoryMoment) -> str:
    """Return a device's name."""
    return "cpu" if device.device < 0 else f"device {device.device}"


def device_lines(device: DeviceMemory) -> list[str]:
    """Return what is in use, the peak, the growth, and what did not fit."""
    rounding = device.allocated_bytes - device.requested_bytes
    lines = [
        f"in use {_mib(device.allocated_bytes)} MiB that the trace saw allocated"
        if not device.num_segments
        else f"reserved {_mib(device.reserved_bytes)} MiB in {device.num_segments:,} segments: "
        f"in use {_mib(device.allocated_bytes)} ({_mib(rounding)} of it by rounding up), "
        f"awaiting free {_mib(device.awaiting_free_bytes)}, "
        f"free {_mib(device.free_bytes)}, the largest piece of it {_mib(device.largest_free_bytes)}",
    ]
    if device.private_free_bytes:
        lines.append(f"{_mib(device.private_free_bytes)} MiB of what is free are in private pools, of CUDA graphs only")
    if device.peak_bytes is None:
        lines.append("no history: torch.cuda.memory._record_memory_history() keeps it")
    else:
        after = "" if device.peak_after_us is None else f" after {device.peak_after_us / 1e3:,.2f} ms"
        times = " without times" if device.peak_after_us is None else ""
        lines.append(f"peak {_mib(device.peak_bytes)} MiB{after}, in a history of {device.num_events:,} events{times}")
    for title, kind in (("category", "category"), ("operation or module", "operation")):
        sums = _sums(device.at_peak, kind)
        lines += [f"at the peak by {title}, in MiB: {sums}"] if sums else []
    lines += map(_growth, device.growth)
    lines += [f"allocator: {device.settings}"] if device.settings else []
    if device.contradictions:
        lines += ["the history contradicts itself, so the peak and its places may be wrong:", *device.contradictions]
    return [*lines, *(_refused(item, device) for item in device.out_of_memory)]


def _growth(growth: StepGrowth) -> str:
    """Return the growth in words: how much a step, where, and from which to which memory."""
    where = f", most at {growth.kept[0].place}, {growth.kept[0].num_blocks:,} blocks kept" if growth.kept else ""
    added = f"{_mib(growth.added_bytes_per_step, signed=True)} MiB a step over {growth.num_steps:,} of {growth.phase}"
    return f"growth {added}{where}, from {_mib(growth.first_bytes)} to {_mib(growth.last_bytes)} MiB"


def places_by_title(device: DeviceMemory) -> dict[str, Sequence[MemoryPlace]]:
    """Return the tables of places that hold anything."""
    tables = {"in use now": device.now}
    if device.peak_bytes is not None:
        tables = {"at the peak": device.at_peak, **tables, "allocated in the history, and kept": device.kept}
    return {title: places for title, places in tables.items() if places}


def _device(summary: MemorySummary, device: DeviceMemory, width: int | None) -> Iterator[str]:
    yield "\n  ".join([f"{summary.file}, {device_name(device)}", *device_lines(device)])
    yield from (f"{title}:\n{_places(places, width)}" for title, places in places_by_title(device).items())


def _sums(places: Sequence[MemoryPlace], kind: str) -> str:
    """Return the bytes of each category or operation, the most first; nothing where none is known."""
    sums = Counter[str]()
    for place in places:
        sums[getattr(place, kind) or _UNKNOWN] += place.num_bytes
    is_known = bool(set(sums) - {_UNKNOWN})
    return ", ".join(f"{name} {_mib(size)}" for name, size in sums.most_common(_MOST_ROWS)) if is_known else ""


def _refused(refused: OutOfMemory, device: DeviceMemory) -> str:
    """Return what did not fit. What the allocator kept then is not in the file: what it keeps now may tell."""
    free = "unknown" if refused.device_free_bytes is None else f"{_mib(refused.device_free_bytes)} MiB"
    text = f"out of memory: {_mib(refused.requested_bytes)} MiB at {refused.place}, the device had {free} left"
    shared_bytes = device.free_bytes - device.private_free_bytes
    if device.largest_free_bytes < refused.requested_bytes <= shared_bytes:
        text += "; it is free by now, in smaller pieces: fragmentation"
        text += "" if "expandable_segments" in device.settings else ", which expandable_segments:True avoids"
    fitted = max(device.largest_free_bytes, refused.device_free_bytes or 0)
    whole = shared_bytes + (refused.device_free_bytes or 0)
    return f"{text}; {_mib(fitted)} MiB would fit now, {_mib(whole)} if all of it were one piece"


def place_row(place: MemoryPlace) -> list[str]:
    """Return the cells of a place, under `PLACE_HEADERS`."""
    return [place.place, place.operation or "-", place.category or "-", f"{place.num_blocks:,}", _mib(place.num_bytes)]


def _places(places: Sequence[MemoryPlace], width: int | None) -> str:
    rows = [place_row(place) for place in places[:_MOST_ROWS]]
    table = fitted_table(rows, PLACE_HEADERS, width=width, dispensable=_DISPENSABLE)
    left = places[_MOST_ROWS:]
    return table + (f"\nand {_mib(sum(item.num_bytes for item in left))} MiB of {len(left):,} more" if left else "")


def _changes(changes: Sequence[PlaceChange], width: int | None) -> str:
    rows = []
    for change in changes[:_MOST_ROWS]:
        added = _mib(change.added_bytes, signed=True)
        rows.append([change.place, str(change.device), _mib(change.before_bytes), _mib(change.after_bytes), added])
    table = fitted_table(rows, ["place", "device", "before", "after", "MiB"], width=width, dispensable=["device"])
    left = len(changes) - _MOST_ROWS
    return table + (f"\nand {left:,} more" if left > 0 else "")


def _mib(num_bytes: float, *, signed: bool = False) -> str:
    return f"{num_bytes / 2**20:{'+' if signed else ''},.2f}"
