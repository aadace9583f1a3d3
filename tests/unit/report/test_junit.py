from harness.report.check.json import check_properties
from harness.results.check import CheckResult

from .examples import build


def test_every_property_is_a_pair_of_strings_of_its_own(result: CheckResult):
    pairs = check_properties(result)
    assert all(type(name) is str and type(value) is str for name, value in pairs)
    assert len(dict(pairs)) == len(pairs)


def test_a_mismatch():
    figures = dict(check_properties(build("mismatch")))
    assert figures["verdict"] == "mismatch"
    assert figures["roundings_max.rotary"] == "38.2"
    assert figures["propagated_ratio_max"] == "831"
    assert figures["first_divergence"] == (
        "model.layers.20.q_rope: request 1, position 17, step 4, decode, schedule batched"
    )
    assert (figures["tokens_compared"], figures["tokens_equal"], figures["tokens_ties"]) == ("96", "90", "1")
    assert figures["findings"] == "H040 H048"


def test_what_was_not_measured_is_left_out():
    figures = dict(check_properties(build("nothing")))
    assert not {"propagated_ratio_max", "first_divergence"} & figures.keys()
    assert figures["tokens_compared"] == "0"
