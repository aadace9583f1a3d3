"""Traces in Perfetto's own format, a protocol buffer: slices of tracks become the events of a Chrome trace.

The package `perfetto` has the format. Of a slice are read: begin and end, category and name (interned or not), the
process and thread of its track, and `correlation` among its debug annotations. Counters and flows are left out.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import NO_CORRELATION, Arguments, Event, Trace, build_trace

ENDINGS = (".pftrace", ".perfetto-trace")
_BEGIN, _END = 1, 2
"""TrackEvent.Type."""
_DELTA_CLOCKS = range(64, 128)
"""Clocks of one writer, whose times are differences; a trace that has them is refused."""


def is_perfetto(path: Path) -> bool:
    """Whether a regular file has one of the endings of Perfetto's format, which has no first bytes of its own."""
    return path.is_file() and path.name.endswith(ENDINGS)


def read_perfetto(path: Path) -> Trace:
    """Read a trace of Perfetto.

    Raises:
        HarnessError: TRACE_UNREADABLE: the package is not installed; TRACE_DAMAGED; NO_TRACE_EVENTS: it has no slices.
    """
    try:
        from google.protobuf.message import DecodeError
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Packets
    except ImportError as error:
        what = f"Perfetto's format needs a package that is not installed: {error.name}"
        raise HarnessError(Code.TRACE_UNREADABLE, what, where=path, hint="pip install perfetto") from error
    try:
        packets = _expanded(Packets.FromString(path.read_bytes()))
        slices = _Slices()
        events = list(slices.read(packets))
        left_out = {"slices without an end": sum(map(len, slices.open.values()))}
        trace = build_trace([events], num_events=len(packets), left_out=left_out)
    except (DecodeError, ValueError, zlib.error) as error:
        what = f"the trace of Perfetto cannot be read: {error}"
        raise HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="record it again") from error
    except OSError as error:
        what = f"the trace cannot be read: {error.strerror}"
        raise HarnessError(Code.TRACE_UNREADABLE, what, where=path) from error
    if not events:
        what = "the trace of Perfetto has no slices"
        raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected="packets with a track_event")
    return trace


_MOST_BYTES = 1 << 28
"""Of one compressed packet: writers cut them at some hundred kilobytes."""


def _expanded(trace: Any) -> list[Any]:
    """Return the packets of a trace, and of its compressed packets; these hold no others."""
    packets: list[Any] = []
    for packet in trace.packet:
        if packet.HasField("compressed_packets"):
            stream = zlib.decompressobj()
            text = stream.decompress(packet.compressed_packets, _MOST_BYTES)
            if not stream.eof:
                raise ValueError(f"a compressed packet is cut off, or larger than {_MOST_BYTES:,} bytes")
            packets += type(trace).FromString(text).packet
        else:
            packets.append(packet)
    return packets


@dataclass(slots=True)
class _Slices:
    """Pairs the begin and end of slices, track by track."""

    tracks: dict[int, tuple[int | str, int]] = field(default_factory=dict)
    """Process and thread of a track."""
    names: dict[tuple[int, str, int], str] = field(default_factory=dict)
    """What a number stands for in one sequence of packets: (sequence, kind of name, number)."""
    default_tracks: dict[int, int] = field(default_factory=dict)
    open: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Slices of each track that have no end yet."""

    def read(self, packets: Iterable[Any]) -> Iterator[Event]:
        """Yield the slices that have an end."""
        for packet in packets:
            self._learn(packet)
            if not packet.HasField("track_event"):
                continue
            if packet.timestamp_clock_id in _DELTA_CLOCKS:
                raise ValueError("its times are differences (incremental clocks)")
            event, sequence = packet.track_event, packet.trusted_packet_sequence_id
            track = event.track_uuid or self.default_tracks.get(sequence, 0)
            if event.type == _BEGIN:
                self.open[track].append(self._begun(event, sequence, track, packet.timestamp))
            elif event.type == _END and self.open[track]:
                begun = self.open[track].pop()
                begun.dur = packet.timestamp / 1e3 - begun.ts
                yield begun

    def _learn(self, packet: Any) -> None:
        """Keep what later packets refer to: tracks, names by number, and the track of a sequence."""
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            of_parent = self.tracks.get(track.parent_uuid, (track.process.pid, 0))
            is_thread = track.HasField("thread")
            process = track.thread.pid if is_thread else of_parent[0]
            self.tracks[track.uuid] = process, track.thread.tid if is_thread else track.uuid
        if packet.HasField("interned_data"):
            for kind in ("event_names", "event_categories", "debug_annotation_names"):
                for item in getattr(packet.interned_data, kind):
                    self.names[sequence, kind, item.iid] = item.name
        if packet.HasField("trace_packet_defaults"):
            defaults = packet.trace_packet_defaults
            if defaults.track_event_defaults.track_uuid:
                self.default_tracks[sequence] = defaults.track_event_defaults.track_uuid
            if defaults.timestamp_clock_id in _DELTA_CLOCKS:
                raise ValueError("its times are differences (incremental clocks)")

    def _begun(self, event: Any, sequence: int, track: int, time_ns: int) -> Event:
        name = event.name or self.names.get((sequence, "event_names", event.name_iid), "")
        interned = (self.names.get((sequence, "event_categories", iid), "") for iid in event.category_iids)
        category = next(iter(event.categories), None) or next(interned, "")
        if not isinstance(name, str) or not isinstance(category, str):  # protobuf returns bytes
            raise ValueError(f"a name is no UTF-8: {name!r}, {category!r}")
        process, thread = self.tracks.get(track, (0, track))
        return Event(
            ph="X",
            cat=category,
            name=name,
            pid=process,
            tid=thread,
            ts=time_ns / 1e3,
            args=Arguments(correlation=self._correlation(event, sequence)),
        )

    def _correlation(self, event: Any, sequence: int) -> int:
        for item in event.debug_annotations:
            name = item.name or self.names.get((sequence, "debug_annotation_names", item.name_iid), "")
            if name == "correlation":
                number = int(item.int_value or item.uint_value)
                if not NO_CORRELATION <= number < 2**63:
                    raise ValueError(f"the correlation {number} is no number of a call")
                return number
        return NO_CORRELATION
