"""What is said of a GPU, on a trace that was built by hand: idle time by cause, launches, communication, modules."""

import gzip
import json
import re
from dataclasses import replace

import pytest

from harness.profiling.trace.compare import diff_traces
from harness.profiling.trace.device import device_activity
from harness.profiling.trace.file import read_trace, trace_files
from harness.profiling.trace.nesting import flame
from harness.profiling.trace.summary import summarize
from harness.report.trace import flame_html, summary_text

from .cuda_trace import KERNELS, cuda_trace, write_ranks


@pytest.fixture
def ranks(tmp_path):
    return write_ranks(tmp_path / "traces")


@pytest.fixture
def activity(ranks):
    (activity,) = device_activity(read_trace(ranks[0]))
    return activity


def test_idle_time_has_a_cause(activity):
    compute = activity.idle[0]
    assert (compute.host_late_us, compute.queued_us, compute.other_us) == pytest.approx((140.0, 0.02, 19.98))
    assert activity.span_us == pytest.approx(404.0 - 40.0)
    assert activity.busy_us == pytest.approx(50 + 100 + 50 + 4 + 0.02), "the collective covers the 20 ns, too"


def test_launches_are_counted_and_delayed(activity):
    launches = activity.launches
    assert (launches.num_launches, launches.num_unknown, launches.call_us) == (5, 0, 25.0)
    assert launches.delay_us_median == pytest.approx(35.0)
    assert launches.delay_us_max == pytest.approx(400.0 - 255.0)
    assert launches.num_shorter_than_launch == 1


def test_communication_is_hidden_by_kernels_that_compute(activity):
    communication = activity.communication
    assert (communication.num_kernels, communication.total_us) == (1, 60.0)
    assert communication.hidden_us == pytest.approx(59.98)
    assert communication.compute_us == pytest.approx(204.0)


def test_a_launch_that_the_trace_does_not_show_is_no_cause(tmp_path):
    document = cuda_trace()
    document["traceEvents"] = [e for e in document["traceEvents"] if e["cat"] != "cuda_runtime"]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    (activity,) = device_activity(read_trace(path))
    assert (activity.launches.num_launches, activity.launches.num_unknown) == (0, len(KERNELS))
    assert activity.idle[0].host_late_us == 0
    assert "5 kernels have no launching call" in summary_text([summarize(path)])


def test_modules_are_rolled_up_by_class_with_their_kernels(ranks):
    outer, linear = summarize(ranks[0]).modules
    assert (outer.path, linear.path) == ("Model", "Model/Linear")
    assert (outer.count, linear.count, linear.num_operators) == (1, 2, 2)
    assert (outer.total_us, outer.self_us) == (1000.0, 700.0)
    assert linear.device_us == pytest.approx(50 + 100 + 50 + 4 + 60)
    assert outer.device_us == 0


def test_kernels_are_summed_up_by_the_module_that_launched_them(ranks):
    kernels = summarize(ranks[0]).module_kernels
    assert {kernel.path for kernel in kernels} == {"Model/Linear"}
    assert [(kernel.name.partition("_")[0], kernel.count, kernel.total_us) for kernel in kernels] == [
        ("ampere", 2, 150.0),
        ("ncclDevKernel", 1, 60.0),
        ("elementwise", 2, 54.0),
    ]


def test_the_ranks_of_a_folder_stand_side_by_side(ranks):
    files = trace_files([ranks[0].parent])
    assert files == ranks
    summaries = [summarize(file) for file in files]
    assert [summary.rank for summary in summaries] == [0, 1]
    assert [summary.devices[0].communication.total_us for summary in summaries] == [60.0, 90.0]
    text = summary_text(summaries)
    assert "in 1 collectives that all have, ranks wait for 0, up to 0.03 ms" in text
    twice = summary_text([summaries[0], replace(summaries[0], path="x/again.json")])
    assert "rank0.pt.trace.json.gz" in twice, "of two files of one rank, the names tell them apart"
    assert "again.json" in twice


@pytest.mark.parametrize(
    "form", ["runs/1759139542.1234567-profile-of-a-server-TP-{}.trace.json.gz", "runs/rank-{}/a.pt.trace.json.gz"]
)
def test_files_without_a_rank_are_told_apart_by_what_differs(ranks, form):
    summaries = [replace(summarize(file), rank=None, path=form.format(at)) for at, file in enumerate(ranks)]
    waits = summary_text(summaries).rpartition("waits us")[2]
    assert "-0" in waits
    assert "-1" in waits


def test_a_pattern_says_what_a_phase_is(ranks):
    summary = summarize(ranks[0], re.compile(r"nn\.Module: (Linear)_\d+"))
    assert [(phase.name, phase.count, phase.total_us) for phase in summary.phases] == [("Linear", 2, 300.0)]
    assert {(op.name, op.phase, op.count) for op in summary.operators if op.device == "cpu"} == {
        ("aten::mm", "Linear", 2)
    }
    kernels = {op.name: op.phase for op in summary.operators if op.device == "gpu"}
    assert set(kernels.values()) == {"Linear"}


def test_a_difference_names_modules(ranks, tmp_path):
    document = cuda_trace()
    extra = next(e for e in document["traceEvents"] if e["name"] == "aten::mm")
    document["traceEvents"].append(extra | {"name": "aten::clone", "ts": 101.0, "dur": 2.0})
    path = tmp_path / "more.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(document, file)
    (change,) = (row for row in diff_traces(summarize(ranks[0]), summarize(path)).changes if row.device == "module")
    assert (change.name, change.count_before, change.count_after) == ("Model/Linear", 2, 3)


def test_products_have_the_rate_of_their_kernels(ranks):
    (product,) = summarize(ranks[0]).rates
    assert (product.name, product.shapes, product.count) == ("aten::mm", "[128, 256] [256, 512]", 2)
    assert product.flops == 2 * 2 * 128 * 256 * 512
    assert product.time_us == pytest.approx(50 + 100 + 50 + 4 + 60)
    assert product.flops_per_s == pytest.approx(product.flops / 264e-6)


def test_a_call_without_its_kernel_counts_in_no_rate(tmp_path):
    document = cuda_trace()
    kernels = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    lost = [kernel for kernel in kernels if kernel["args"]["correlation"] == 1]  # the only one of the first product

    def rates():
        (tmp_path / "trace.json").write_text(json.dumps(document))
        return summarize(tmp_path / "trace.json").rates

    document["traceEvents"] = [event for event in document["traceEvents"] if event not in lost]
    (product,) = rates()
    assert (product.count, product.flops, product.time_us) == (1, 2 * 128 * 256 * 512, pytest.approx(214))
    for kernel in kernels:
        kernel["args"].pop("correlation", None)
    assert rates() == (), "the time of the CPU is that of the launches"


H100 = "NVIDIA H100 80GB HBM3"


def rates_of(tmp_path, *operators, card=H100):
    """Return the rates of operators on a card; each is a name, shapes, dtypes, strides; its kernel takes 10 us."""
    events = []
    for number, (name, *inputs) in enumerate(operators):
        at = {"ph": "X", "pid": 1, "tid": 1, "ts": 100.0 * number, "dur": 50.0}
        arguments = dict(zip(("Input Dims", "Input type", "Input Strides"), inputs, strict=False))
        events.append(at | {"cat": "cpu_op", "name": name, "args": arguments})
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at["ts"] + 1, "dur": 1.0}
        events.append(at | launch | {"args": {"correlation": number}})
        kernel = {"cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": at["ts"] + 5, "dur": 10.0}
        events.append(at | kernel | {"args": {"correlation": number, "stream": 7}})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"id": 0, "name": card}]}))
    return summarize(path).rates


BF16, F32, SCALAR = "c10::BFloat16", "float", "Scalar"


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "flops", "num_bytes"),
    [
        ("aten::mm", [[8, 4], [4, 2]], [BF16, BF16], 2 * 8 * 4 * 2, 2 * (8 * 4 + 4 * 2 + 8 * 2)),
        ("aten::addmm", [[2], [8, 4], [4, 2], [], []], [F32, F32, F32, SCALAR, SCALAR], 128, 4 * (2 + 32 + 8 + 16)),
        ("aten::mul", [[8, 1, 4], [2, 1]], [F32, F32], 0, 4 * (32 + 2 + 8 * 2 * 4)),
        ("aten::add_", [[8, 4], [8, 4], []], [BF16, BF16, SCALAR], 0, 2 * 3 * 32),
        ("aten::copy_", [[8, 4], [8, 4], []], [BF16, F32, SCALAR], 0, 2 * 32 + 4 * 32),
        ("aten::mean", [[8, 4], [], []], [F32, "", ""], 0, 4 * 32),
        ("aten::cumsum", [[8, 4], []], [F32, SCALAR], 0, 2 * 4 * 32),
        ("aten::_flash_attention_forward", [[1, 8, 2, 4]] * 3 + [[8]], [BF16] * 3 + ["int"], 0, 2 * 4 * 64),
    ],
)
def test_the_work_of_an_operator_follows_from_its_shapes(tmp_path, name, shapes, dtypes, flops, num_bytes):
    (rate,) = rates_of(tmp_path, (name, shapes, dtypes))
    assert (rate.flops, rate.num_bytes) == (flops, num_bytes)
    assert (rate.flops_per_s, rate.bytes_per_s) == pytest.approx((flops / 10e-6, num_bytes / 10e-6))


@pytest.mark.parametrize(
    ("strides", "num_stored"),
    [
        ([[4, 1], [4, 1]], 32),
        ([[1, 8], [4, 1]], 32),  # transposed
        ([[0, 1], [4, 1]], 4),  # expanded
        ([[0, 0], [4, 1]], 1),
        ([[1000, 0], [4, 1]], 8),  # a column of a wider tensor, expanded
        ([[1, 1], [4, 1]], 11),  # a sliding window
        ([[-4, 1], [4, 1]], 0),
        ([[4], [4, 1]], 32),
        ([[0, 1]], 32),
        ("[0, 1]", 32),
        ([[0, 1], None], 4),
    ],
)
def test_an_expanded_input_counts_as_it_lies_in_memory(tmp_path, strides, num_stored):
    (rate,) = rates_of(tmp_path, ("aten::mul", [[8, 4], [8, 4]], [F32, F32], strides))
    assert rate.num_bytes == 4 * (num_stored + 32 + 32)


def test_calls_that_differ_in_where_their_inputs_lie_are_one_row(tmp_path):
    call = ("aten::mul", [[8, 4], [8, 4]], [F32, F32])
    strides = [[[4, 1], [4, 1]], [[1, 8], [4, 1]], [[8, 1], [4, 1]], [[0, 1], [4, 1]]]
    whole, expanded = rates_of(tmp_path, *((*call, item) for item in strides))
    assert (whole.count, expanded.count) == (3, 1)


@pytest.mark.parametrize(
    "operator",
    [
        ("aten::embedding", [[1000, 64], [8]], [F32, "long int"]),  # some rows of the table are read
        ("aten::mul", [[8, 3], [8, 4]], [F32, F32]),  # not broadcast
        ("aten::mm", [[8, -4], [4, 2]], [F32, F32]),
        ("aten::mul", [[2**62, 2**62], []], [F32, SCALAR]),
        ("aten::mul", [[8]], ["c10::complex<float>"]),
        ("aten::mul", "[8]", [F32]),
        ("aten::mm", [[8, 4]], [F32]),
    ],
)
def test_an_operator_whose_work_is_not_known_has_no_rate(tmp_path, operator):
    assert rates_of(tmp_path, operator) == ()


@pytest.mark.parametrize(
    ("card", "dtype", "flops_per_s", "bytes_per_s"),
    [
        (H100, BF16, 989e12, 3.35e12),
        (H100, "c10::Float8_e4m3fn", 1979e12, 3.35e12),
        (H100, "double", None, 3.35e12),
        ("AMD Instinct MI300X VF", BF16, 1307e12, 5.3e12),
        ("NVIDIA H100 NVL", BF16, None, None),  # another card of a like name
    ],
)
def test_a_rate_stands_beside_the_data_sheet_of_its_card(tmp_path, card, dtype, flops_per_s, bytes_per_s):
    (rate,) = rates_of(tmp_path, ("aten::mm", [[8, 4], [4, 2]], [dtype, dtype]), card=card)
    assert (rate.peak_flops_per_s, rate.peak_bytes_per_s) == (flops_per_s, bytes_per_s)


def test_equal_calls_under_equal_callers_are_one_frame(ranks):
    root = flame(ranks[0])
    (step,) = root.children.values()
    assert step.name == "nn.Module: Model_0"
    linear = step.children["ProfilerStep#3"].children["nn.Module: Linear_0"]
    assert (linear.count, linear.total_us) == (1, 100.0)
    assert linear.children["aten::mm"].children["cudaLaunchKernel"].total_us == 5.0
    assert root.total_us == 1000.0


def test_a_flame_graph_is_one_page_whose_names_stay_text(tmp_path):
    document = cuda_trace()
    document["traceEvents"][1]["name"] = "<img src=x onerror=alert(1)>"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    page = flame_html(flame(path))
    assert "<img" not in page
    assert "&lt;img" in page
    assert "http" not in page


def test_a_graph_is_one_launch_with_the_slowest_replay_and_its_gaps(tmp_path):
    """Two replays of two kernels, 2 us apart the first time and 7 us the second; one kernel of its own."""
    graph = [(1, 10.0, (20.0, 30.0)), (2, 60.0, (70.0, 85.0))]
    document = cuda_trace(kernels=[(9, "gemm", 90.0, 7, 120.0, 8.0)])
    for correlation, launched, begins in graph:
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 100, "tid": 1}
        document["traceEvents"].append(call | {"ts": launched, "dur": 5.0, "args": {"correlation": correlation}})
        for begin in begins:
            kernel = {"ph": "X", "cat": "kernel", "name": "norm", "pid": 0, "tid": 7, "ts": begin, "dur": 8.0}
            document["traceEvents"].append(kernel | {"args": {"correlation": correlation}})
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    (activity,) = summarize(path).devices
    assert (activity.num_launches, activity.launches.call_us, activity.launches.delay_us_max) == (3, 15.0, 25.0)
    assert activity.idle[0].in_graph_us == pytest.approx(2.0 + 7.0)
    (replays,) = activity.graphs
    assert (replays.num_nodes, replays.count, replays.slowest, replays.slowest_at_us) == (2, 2, 1, 70.0)
    assert (replays.replay_us_median, replays.replay_us_max) == pytest.approx((20.5, 23.0))
    assert (replays.inside_idle_us, replays.between_idle_us) == pytest.approx((9.0, 32.0))
