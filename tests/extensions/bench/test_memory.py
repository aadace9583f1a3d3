"""What the process grew by is counted for the peer that it worked for."""

import pytest

from harness.extensions.bench import peers
from harness.extensions.bench.peers import PAGE_BYTES, ResidentMemory


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Return what sets the process's resident pages."""
    monkeypatch.setattr(peers, "STATM", tmp_path / "statm")

    def say(resident):
        (tmp_path / "statm").write_text(f"{resident + 1000} {resident} 12 3 0 400 0\n")

    say(100)
    return say


def test_growth_adds_up_by_peer_and_shrinking_counts_for_nobody(pages):
    counted = ResidentMemory()
    for peer, resident in (("ours", 150), ("theirs", 250), ("ours", 240), ("ours", 245)):
        with counted.of(peer):
            pages(resident)
    assert counted.grown_bytes == {"ours": 55 * PAGE_BYTES, "theirs": 100 * PAGE_BYTES}


def test_a_system_that_does_not_tell_counts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "STATM", tmp_path / "absent")
    counted = ResidentMemory()
    with counted.of("ours"):
        pass
    assert counted.grown_bytes == {}


def test_memory_is_really_taken():
    counted = ResidentMemory()
    with counted.of("ours"):
        taken = bytearray(64 << 20)
    if not counted.grown_bytes:
        pytest.skip("this system does not tell what a process has resident")
    assert counted.grown_bytes["ours"] >= len(taken) // 2
