"""Traces in Perfetto's own format, written with Perfetto's package."""

import os
import zlib

import pytest

pytest.importorskip("perfetto", reason="the package perfetto is not installed")

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from harness.errors import Code, HarnessError
from harness.profiling.trace.file import read_trace, trace_files
from harness.profiling.trace.summary import summarize
from harness.report.trace import summary_text

HOST, STREAM = 11, 12
BEGIN, END = proto.TrackEvent.TYPE_SLICE_BEGIN, proto.TrackEvent.TYPE_SLICE_END


def descriptor(trace, uuid, *, pid, tid):
    track = trace.packet.add().track_descriptor
    track.uuid, track.thread.pid, track.thread.tid = uuid, pid, tid


def slice_of(trace, track, name, category, begin_us, end_us, *, correlation=None, iid=None):
    """Add a slice; with `iid`, name and category are interned under this number."""
    for kind, time_us in ((BEGIN, begin_us), (END, end_us)):
        packet = trace.packet.add()
        packet.timestamp, packet.trusted_packet_sequence_id = int(1000 * time_us), 1
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        if kind == END:
            continue
        if iid is None:
            packet.track_event.name = name
            packet.track_event.categories.append(category)
        else:
            packet.interned_data.event_names.add(iid=iid, name=name)
            packet.interned_data.event_categories.add(iid=iid, name=category)
            packet.track_event.name_iid = iid
            packet.track_event.category_iids.append(iid)
        if correlation is not None:
            packet.track_event.debug_annotations.add(name="correlation", uint_value=correlation)


def step():
    """Return a decode step of 100 us that launches one kernel of 30 us."""
    trace = proto.Trace()
    descriptor(trace, HOST, pid=7, tid=70)
    descriptor(trace, STREAM, pid=0, tid=1)
    slice_of(trace, STREAM, "nvjet_64x8", "kernel", 1040, 1070, correlation=5, iid=3)
    slice_of(trace, HOST, "decode[bs=2 toks=2 kv=64]", "user_annotation", 1000, 1100)
    slice_of(trace, HOST, "cudaLaunchKernel", "cuda_runtime", 1010, 1015, correlation=5)
    return trace


def test_slices_are_events(tmp_path):
    path = tmp_path / "run.pftrace"
    path.write_bytes(step().SerializeToString())
    assert trace_files([tmp_path]) == [path]
    (read,) = summarize(path).steps
    assert (read.phase, read.size) == ("decode", "2 requests")
    assert {name: read.figures[name] for name in ("launches", "kernels", "GEMM us", "step us")} == {
        "launches": 1, "kernels": 1, "GEMM us": 30.0, "step us": 100.0,
    }  # fmt: skip


def test_slices_of_one_track_are_nested_by_their_ends(tmp_path):
    trace = proto.Trace()
    for kind, name, time_ns in ((BEGIN, "outer", 0), (BEGIN, "inner", 1000), (END, "", 3000), (END, "", 9000)):
        packet = trace.packet.add()
        packet.timestamp = time_ns
        packet.track_event.type, packet.track_event.track_uuid, packet.track_event.name = kind, HOST, name
    path = tmp_path / "run.pftrace"
    path.write_bytes(trace.SerializeToString())
    read = read_trace(path)
    assert {read.name_of(at): int(read.duration_ns[at]) for at in range(2)} == {"outer": 9000, "inner": 2000}


def test_compressed_packets_are_read(tmp_path):
    packed = proto.Trace()
    packed.packet.add().compressed_packets = zlib.compress(step().SerializeToString())
    for name, trace in (("plain", step()), ("packed", packed)):
        (tmp_path / f"{name}.pftrace").write_bytes(trace.SerializeToString())
    plain, of_packed = (read_trace(tmp_path / f"{name}.pftrace") for name in ("plain", "packed"))
    assert (of_packed.labels, of_packed.num_events) == (plain.labels, plain.num_events)
    assert list(of_packed.start_ns) == list(plain.start_ns)


def test_slices_without_an_end_are_left_out_and_told(tmp_path):
    trace = step()
    del trace.packet[-1]
    (tmp_path / "run.pftrace").write_bytes(trace.SerializeToString())
    summary = summarize(tmp_path / "run.pftrace")
    assert summary.left_out == ("1 slices without an end",)
    assert "left out: 1 slices without an end" in summary_text([summary])


def with_differences():
    trace = step()
    trace.packet[2].timestamp_clock_id = 64
    return trace.SerializeToString()


def with_correlation(number):
    trace = step()
    slice_of(trace, HOST, "cudaLaunchKernel", "cuda_runtime", 1090, 1095, correlation=number)
    return trace.SerializeToString()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (step().SerializeToString()[:-3], Code.TRACE_DAMAGED),
        (b"no protocol buffer", Code.TRACE_DAMAGED),
        (b"", Code.NO_TRACE_EVENTS),
        (with_differences(), Code.TRACE_DAMAGED),
        (with_correlation(2**64 - 1), Code.TRACE_DAMAGED),
        (step().SerializeToString().replace(b"cudaLaunchKernel", b"cudaLaunchKerne\xff"), Code.TRACE_DAMAGED),
        (step().SerializeToString().replace(b"cuda_runtime", b"cuda_runtim\xff"), Code.TRACE_DAMAGED),
        (proto.Trace(packet=[{"compressed_packets": b"x"}]).SerializeToString(), Code.TRACE_DAMAGED),
    ],
    ids=["cut off", "other", "empty", "incremental clock", "correlation", "name", "category", "compressed"],
)
def test_what_cannot_be_read_is_refused(tmp_path, content, code):
    path = tmp_path / "run.pftrace"
    path.write_bytes(content)
    with pytest.raises(HarnessError) as refused:
        read_trace(path)
    assert refused.value.code == code


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.pftrace")
    with pytest.raises(HarnessError, match="not a regular file"):
        read_trace(tmp_path / "run.pftrace")
