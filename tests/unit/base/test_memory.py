"""Memory that is left: the machine's, or what the container's limit leaves of it; and no garbage collected."""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest

from harness.base import memory
from harness.base.memory import collecting_no_garbage

KIB = 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1000 KiB, and files of a control group that a test writes."""
    (tmp_path / "meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", [(tmp_path / "max", tmp_path / "current")])
    return tmp_path


def test_a_machine_without_limits_has_what_it_says(machine):
    assert memory.available_bytes() == 1000 * KIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 1000 * KIB), (str(300 * KIB), 200 * KIB), (str(50 * KIB), 0)])
def test_a_container_has_what_its_limit_leaves(machine, limit, expected):
    (machine / "max").write_text(f"{limit}\n")
    (machine / "current").write_text(f"{100 * KIB}\n")
    assert memory.available_bytes() == expected


def test_a_system_that_does_not_tell_has_all_of_its_memory(machine):
    (machine / "meminfo").unlink()
    assert memory.available_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_before_after_an_exception(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collecting_no_garbage():
            assert not gc.isenabled()
        with pytest.raises(KeyError), collecting_no_garbage():
            raise KeyError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


class Node:
    def __init__(self):
        self.itself = self


@pytest.fixture
def rare_collections():
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.collect()
    gc.set_threshold(700, 10, 10)
    memory.collect_rarely()
    yield 700, 10, 10
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks


def test_young_cycles_are_collected_while_all_objects_are_searched_rarely(rare_collections):
    num_full = gc.get_stats()[2]["collections"]
    cycles = [weakref.ref(Node()) for _ in range(1000)]
    kept = [[] for _ in range(200_000)]  # with Python's thresholds, some full collections
    assert gc.get_stats()[2]["collections"] == num_full
    assert not any(cycle() for cycle in cycles)
    del kept


def test_all_objects_are_searched_as_before_once_that_finds_many(rare_collections):
    assert gc.get_threshold() != rare_collections
    gc.collect()
    assert gc.get_threshold() != rare_collections, "nothing was found"
    nodes = [Node() for _ in range(1000)]
    gc.collect(1)  # they are old now
    del nodes
    gc.collect()
    assert gc.get_threshold() == rare_collections


@pytest.mark.parametrize(("free", "is_given_back"), [(64 << 20, False), ((64 << 20) + 1, True)])
def test_memory_is_given_back_where_much_is_free(monkeypatch, free, is_given_back):
    trimmed = []
    libc = SimpleNamespace(mallinfo2=lambda: SimpleNamespace(fordblks=free), malloc_trim=trimmed.append)
    monkeypatch.setattr(memory, "_glibc", lambda: libc)
    memory.give_back()
    assert trimmed == [0] * is_given_back


def test_nothing_is_given_back_without_glibc(monkeypatch):
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    memory.give_back()
