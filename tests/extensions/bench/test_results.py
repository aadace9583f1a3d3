"""Who is ahead, and by how much, from samples made up."""

import pytest

from harness.base.environment import MachineInfo, describe_machine
from harness.extensions.bench.agreement import Agreement
from harness.extensions.bench.peer import Generation
from harness.extensions.bench.report import BandwidthShare, BenchResult, Measure, ProductShare, Rates, bench_text

FASTER = Measure(
    name="uneven workload", unit="tok/s", is_higher_better=True,
    samples={"reference": [30.0, 20.0, 40.0], "slow": [5.0, 5.0, 5.0], "good": [10.0, 20.0, 10.0]},
)  # fmt: skip
SLOWER = Measure(
    name="decode step, batch 1", unit="ms", is_higher_better=False,
    samples={"reference": [4.0, 4.0, 4.0], "slow": [9.0, 9.0, 9.0], "good": [2.0, 3.0, 1.0]},
)  # fmt: skip
ALONE = Measure(name="prefill, batch 1", unit="tok/s", is_higher_better=True, samples={"reference": [7.0]})


def result(*measures):
    return BenchResult(
        shape="tiny", num_parameters=1_320_000, dtype="float32", seed=0, repeats=3,
        machine=MachineInfo(device="A CPU", cpu_flags=("avx2",), num_threads=2, versions={"torch": "2.13"}),
        rates=[
            Rates(copy_bytes_per_second=copy, read_bytes_per_second=2 * copy, product_flops_per_second=30 * copy)
            for copy in (18e9, 20e9, 21e9)
        ],
        measures=measures,
        shares=[
            BandwidthShare(
                workload="batch 1", batch_size=1, bytes_per_step={"reference": 5_000_000}, shares={"reference": 0.5},
                read_shares={"reference": 0.25},
            )
        ],
        product_shares=[ProductShare(workload="batch 1", flops=10**9, shares={"reference": 0.1})],
        agreements=[Agreement(peer="good", num_requests=9, num_ties=2, worst_tie_stds=0.0123)],
        absent={"llamacpp": "No module named 'llama_cpp'"},
    )  # fmt: skip


def test_the_advantage_is_over_the_better_peer_of_the_same_repeat():
    assert FASTER.better_peer == SLOWER.better_peer == "good"
    assert FASTER.advantages == [3.0, 1.0, 4.0]
    assert SLOWER.advantages == [0.5, 0.75, 0.25]


def test_without_a_peer_there_is_no_advantage():
    assert (ALONE.better_peer, ALONE.advantages) == (None, [])


def test_the_page():
    text = bench_text(result(ALONE, SLOWER, FASTER))
    assert "tiny, 1.32M parameters, float32, 3 repeats\nA CPU, 2 threads, avx2\ntorch 2.13" in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert "3.00x good (1.00 to 4.00)" in text
    assert "0.50x good (0.25 to 0.75)" in text
    assert rows["prefill, batch 1"][-4:] == ["7", "-", "-", "-"]
    assert "read and written: 20 GB/s (18 to 21)" in text
    assert "read bandwidth: 40 GB/s (36 to 42)" in text
    assert "products: 0.6 TFLOP/s (0.54 to 0.63)" in text
    assert "share of copies (of reads), decode at batch 1 (5 MB a step): reference 50% (25%)" in text
    assert "share of products, prefill at batch 1: reference 10%" in text
    assert "good: the tokens of reference in 7 of 9 requests, the others part at ties (up to 0.012" in text
    assert "llamacpp: not timed, No module named 'llama_cpp'" in text


def test_json_has_samples_and_what_follows_from_them():
    document = result(FASTER).json()
    (measure,) = document["measures"]
    assert document["schema_version"] == 3
    assert measure["samples"]["reference"] == [30.0, 20.0, 40.0]
    assert (measure["medians"]["reference"], measure["advantages"]) == (30.0, [3.0, 1.0, 4.0])


def test_times_of_a_generation():
    generation = Generation(start=10.0, step_ends=[12.0, 12.5, 14.0])
    assert (generation.seconds, generation.prefill_seconds, generation.decode_step_seconds) == (4.0, 2.0, 1.0)


def test_the_machine_is_described():
    machine = describe_machine("cpu")
    assert machine.device
    assert machine.num_threads >= 1
    assert {"python", "torch", "transformers"} <= set(machine.versions)


def test_a_switch_of_the_environment_is_named(monkeypatch):
    for name in (
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
        "MKL_ENABLE_INSTRUCTIONS",
    ):  # they may be set for the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert describe_machine("cpu").software.endswith(", TORCH_CUDNN_SDPA_DEPRIORITIZED=1")
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    assert "TORCH" not in describe_machine("cpu").software


def test_a_cpu_that_plays_an_older_one_is_named(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in describe_machine("cpu").software


def test_a_peer_that_was_timed_less_often_is_an_error():
    uneven = Measure(name="x", unit="ms", is_higher_better=False, samples={"reference": [1.0, 2.0], "good": [1.0]})
    with pytest.raises(ValueError, match="zip"):
        _ = uneven.advantages
