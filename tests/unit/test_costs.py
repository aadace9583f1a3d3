"""Which expensive tests the default suite leaves out."""

from tests.costs import FILE_SHARE, too_expensive

COSTS = {"test_a.py::test_one": 1.0, "test_a.py::test_two": 2.0, "test_a.py::test_slow": 30.0}


def cases(test, number):
    return [f"test_a.py::{test}[{at}]" for at in range(number)]


def test_what_is_cheap_or_new_runs():
    assert too_expensive(["test_a.py::test_new", *cases("test_two", 0)], COSTS) == set()


def test_a_file_keeps_one_expensive_test_that_is_not_slow():
    assert too_expensive(["test_a.py::test_two"], COSTS) == set()
    assert len(too_expensive(cases("test_two", 3), COSTS)) == 2
    assert too_expensive(["test_a.py::test_slow"], COSTS) == {"test_a.py::test_slow"}


def test_a_share_of_the_time_is_kept_and_different_tests_come_first():
    of_file = [*cases("test_one", 30), *cases("test_two", 5), "test_a.py::test_cheap"]
    kept = {*of_file} - too_expensive(of_file, COSTS)
    assert "test_a.py::test_cheap" in kept
    assert {case.partition("[")[0] for case in kept} >= {"test_a.py::test_one", "test_a.py::test_two"}
    time = sum(COSTS.get(case.partition("[")[0], 0.0) for case in kept)
    assert 0.5 * FILE_SHARE * 40 <= time <= FILE_SHARE * 40 + 1


def test_the_choice_does_not_depend_on_the_order():
    of_file = cases("test_one", 30)
    assert too_expensive(of_file, COSTS) == too_expensive(of_file[::-1], COSTS)
