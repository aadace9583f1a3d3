"""The chain that a duration is made of: on traces built by hand, whose links can be read off."""

import json
import re

import pytest

from harness.errors import HarnessError
from harness.profiling.trace.critical_path import critical_path
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.summary import summarize
from harness.results.trace import LinkKind

from .cuda_trace import cuda_trace

PROCESS, STREAM = {"pid": 1, "tid": 1}, {"pid": 0, "tid": 7}


def cpu(name, begin, duration, category="cpu_op", **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "args": arguments, **PROCESS}


def launch(begin, correlation, duration=5, name="cudaLaunchKernel"):
    return cpu(name, begin, duration, "cuda_runtime", correlation=correlation)


def kernel(name, begin, duration, correlation, category="kernel", stream=7):
    event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, **STREAM, "tid": stream}
    return event | {"args": {"correlation": correlation, "stream": stream}}


@pytest.fixture
def chain(tmp_path):
    def of(*events, **options):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": list(events)}))
        return critical_path(read_trace(path), str(path), **options)

    return of


def links(path):
    return {(link.kind, link.name): link.total_us for link in path.links}


def test_a_host_that_is_late_is_the_path_and_not_the_kernels(chain):
    path = chain(
        cpu("aten::mm", 0, 20), launch(10, 1), kernel("gemm", 20, 5, 1),
        cpu("aten::add", 100, 30), launch(110, 2), kernel("add", 120, 40, 2),
    )  # fmt: skip
    assert links(path) == {
        ("kernel", "add"): 40,
        ("launch", "add"): 10,
        ("operator", "aten::add"): 10,
        ("host", ""): 80,
        ("operator", "aten::mm"): 15,
        ("runtime", "cudaLaunchKernel"): 5,
    }
    assert path.total_us == 160


def test_kernels_that_queue_are_the_path_and_not_the_host(chain):
    path = chain(
        launch(0, 1), launch(10, 2), launch(20, 3),
        kernel("a", 8, 50, 1), kernel("b", 60, 40, 2), kernel("c", 101, 10, 3),
    )  # fmt: skip
    assert links(path) == {
        ("kernel", "a"): 50, ("kernel", "b"): 40, ("kernel", "c"): 10,
        ("queue", "b"): 2, ("queue", "c"): 1, ("launch", "a"): 8,
    }  # fmt: skip


def test_a_call_that_waits_ends_with_the_kernel_it_waited_for(chain):
    path = chain(
        launch(0, 1), kernel("a", 10, 90, 1),
        cpu("cudaDeviceSynchronize", 10, 95, "cuda_runtime"),
        cpu("aten::item", 105, 20),
    )  # fmt: skip
    assert links(path) == {
        ("kernel", "a"): 90,
        ("launch", "a"): 10,
        ("runtime", "cudaDeviceSynchronize"): 5,
        ("operator", "aten::item"): 20,
    }


@pytest.mark.parametrize(("copied_until", "is_waited_for"), [(90, True), (500, False)])
def test_a_copy_blocks_only_where_it_ended_within_its_call(chain, copied_until, is_waited_for):
    path = chain(
        launch(0, 1, name="cudaMemcpyAsync", duration=95),
        kernel("Memcpy DtoH", 10, copied_until - 10, 1, category="gpu_memcpy"),
        cpu("aten::item", 95, 415),
    )  # fmt: skip
    expected = {("operator", "aten::item"): 415, ("runtime", "cudaMemcpyAsync"): 95}
    if is_waited_for:
        expected |= {("runtime", "cudaMemcpyAsync"): 5, ("copy", "Memcpy DtoH"): 80, ("launch", "Memcpy DtoH"): 10}
    assert links(path) == expected


def test_a_kernel_that_waits_for_another_stream_leads_there(chain):
    path = chain(
        launch(0, 1), launch(10, 2),
        kernel("ncclAllReduce", 5, 195, 1, stream=20), kernel("gemm", 202, 50, 2),
    )  # fmt: skip
    assert links(path) == {
        ("kernel", "gemm"): 50,
        ("other stream", "gemm"): 2,
        ("communication", "ncclAllReduce"): 195,
        ("launch", "ncclAllReduce"): 5,
    }


def test_kernels_of_two_streams_that_take_no_time_end_the_chain(chain):
    path = chain(cpu("aten::add", 0, 10), kernel("a", 50, 0, -1), kernel("b", 50, 0, -1, stream=20))
    assert path.total_us == 50


def test_what_lasts_longer_than_the_last_kernel_is_of_the_host(chain):
    path = chain(cpu("decode[bs=1]", 0, 1000, "user_annotation"), launch(0, 1), kernel("a", 10, 50, 1))
    assert links(path) == {("launch", "a"): 10, ("kernel", "a"): 50, ("host", ""): 940}


def test_a_step_is_followed_with_the_kernels_that_it_launched(chain):
    events = [
        cpu("decode[bs=1]", 0, 20, "user_annotation"), launch(5, 1), kernel("a", 10, 30, 1),
        cpu("decode[bs=1]", 100, 20, "user_annotation"), launch(105, 2), kernel("b", 110, 60, 2),
    ]  # fmt: skip
    last = chain(*events, within=re.compile("^decode"), instance=-1)
    assert links(last) == {("kernel", "b"): 60, ("launch", "b"): 5, ("host", ""): 5}
    assert chain(*events, within=re.compile("^decode")).total_us == 40
    with pytest.raises(HarnessError, match="2 events match the step"):
        chain(*events, within=re.compile("^decode"), instance=2)


def test_the_links_add_up_to_the_duration(chain):
    document = cuda_trace()
    path = chain(*document["traceEvents"])
    assert path.total_us == pytest.approx(1000)
    assert sum(path.time_us(kind) for kind in LinkKind) == pytest.approx(path.total_us)


def test_the_span_of_the_profiler_around_the_events_is_in_no_duration(chain, tmp_path):
    path = chain(cpu("PyTorch Profiler (0)", 0, 500, "Trace"), cpu("aten::add", 100, 10), cpu("aten::mul", 120, 30))
    assert links(path) == {("operator", "aten::add"): 10, ("operator", "aten::mul"): 30, ("host", ""): 10}
    read = summarize(tmp_path / "trace.json")
    assert (path.total_us, read.duration_us, read.steps[0].figures["step us"]) == (50, 50, 50)


def test_on_a_cpu_it_is_what_the_last_thread_did(chain):
    path = chain(cpu("aten::linear", 0, 50), cpu("aten::addmm", 10, 30), cpu("aten::add", 60, 10))
    assert links(path) == {
        ("operator", "aten::linear"): 20,
        ("operator", "aten::addmm"): 30,
        ("operator", "aten::add"): 10,
        ("host", ""): 10,
    }


def test_a_trace_without_an_event_has_an_empty_path(chain):
    assert chain({"ph": "M", "name": "process_name", "pid": 1, "args": {}}).links == ()
