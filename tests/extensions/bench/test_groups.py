"""Which engines are open at the same time, and when their tokens are compared."""

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.bench import peers
from harness.extensions.bench import run as measure
from harness.extensions.bench.peer import OURS, BenchConfig, BenchWorkload, Generation, PeerMissingError
from harness.extensions.bench.peers import open_peers, peer_groups
from harness.extensions.bench.report import Rates

RATES = Rates(copy_bytes_per_second=1e9, read_bytes_per_second=1e9, product_flops_per_second=1e12)
WORKLOADS = [
    BenchWorkload(name="even", prompts=[[1]], output_lens=[2]),
    BenchWorkload(name="uneven", prompts=[[1]], output_lens=[2]),
]


@pytest.fixture
def log():
    return []


@pytest.fixture
def setting(tmp_path, log, monkeypatch):
    """Peers that write down what is done with them; `hf-continuous` makes other tokens, `llamacpp` is not installed."""

    class Fake:
        shows_steps = True

        def __init__(self, name):
            self.name = name
            log.append(f"open {name}")

        def generate(self, workload):
            log.append(f"{workload.name} {self.name}")
            token = 5 if self.name == "hf-continuous" else 0
            return Generation(token_ids=[[token] * length for length in workload.output_lens])

        def close(self):
            log.append(f"close {self.name}")

    def opener(name):
        def opened(_setting):
            if name == "llamacpp":
                raise PeerMissingError("no such package")
            return Fake(name)

        return opened

    for name in peers.PEERS:
        monkeypatch.setitem(peers.PEERS, name, opener(name))
    monkeypatch.setattr(peers, "_release", lambda device: log.append("release"))
    monkeypatch.setattr(measure, "measure_rates", lambda dtype, device: RATES)
    monkeypatch.setattr(measure, "load_hf_model", lambda *_: log.append("judge") or "a model")
    monkeypatch.setattr(
        measure, "judge_divergences", lambda divergences, *_, **__: {item.peer: [0.1] for item in divergences}
    )
    return BenchConfig(folder=tmp_path, scratch=tmp_path, dtype="float32", device="cuda", num_threads=1,
                       max_request_len=3, max_total_len=3, max_requests=1, engine_options={})  # fmt: skip


def run(setting, names, device):
    return measure._run_groups(peer_groups(names, device), WORKLOADS, setting, names, 1, lambda *_: None)


def test_on_a_gpu_one_engine_is_open_at_a_time_and_the_judge_comes_last(setting, log):
    result = run(setting, ["hf-generate", "hf-continuous"], "cuda:1")
    assert log == [
        *(f"{what} {name}".strip() if what != "release" else what
          for name in (OURS, "hf-generate", "hf-continuous")
          for what in ("open", "even", "uneven", "even", "uneven", "close", "release")),
        "judge",
    ]  # fmt: skip
    assert {item.peer: item.num_ties for item in result.agreements} == {"hf-generate": 0, "hf-continuous": 2}
    assert list(result.timed[0].generations) == [OURS, "hf-generate", "hf-continuous"]
    assert len(result.rates) == 3


def test_on_the_cpu_all_are_open_and_compared_before_anything_is_timed(setting, log):
    run(setting, ["hf-continuous"], "cpu")
    assert log[:2] == [f"open {OURS}", "open hf-continuous"]
    assert log.index("judge") == 2 + len(WORKLOADS) * 2
    assert log[-3:] == [f"close {OURS}", "close hf-continuous", "release"]


def test_a_peer_that_is_not_installed_is_left_out_unless_it_is_asked_for(setting):
    assert run(setting, [], "cpu").absent == {"llamacpp": "no such package"}
    with pytest.raises(HarnessError) as caught:
        run(setting, ["llamacpp"], "cuda")
    assert caught.value.code is Code.BAD_OPTION


def test_engines_are_closed_when_something_fails(setting, log):
    with pytest.raises(ZeroDivisionError), open_peers([OURS, "hf-generate"], setting, required=[]) as opened:
        raise ZeroDivisionError
    assert opened.peers == []
    assert log[-3:] == [f"close {OURS}", "close hf-generate", "release"]
