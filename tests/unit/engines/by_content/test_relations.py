"""Relations tell the assignment of tensors to taps with the most ties, and none where several have as many."""

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.relations import Candidate, Tie, best_assignment

KNOWN = -2


def assigned(*ties):
    nodes = {node for tie in ties for node in (*tie.origin, tie.result)}
    candidates = {(tap, content): Candidate(content, Columns(start=0, stop=4), content) for tap, content in nodes}
    return {tap: item.content for tap, item in best_assignment(ties, candidates).items()}


def tie(first, second):
    return Tie((first,), second)


def test_a_chain_of_ties_tells_all_its_taps():
    assert assigned(tie(("a", 1), ("b", 2)), tie(("b", 2), ("c", 3))) == {"a": 1, "b": 2, "c": 3}


def test_the_tensor_with_more_ties_is_taken_for_a_tap():
    weak = tie(("a", 9), ("b", 8))
    assert assigned(weak, tie(("a", 1), ("b", 2)), tie(("b", 2), ("c", 3))) == {"a": 1, "b": 2, "c": 3}


def test_a_tie_with_a_known_tap_counts_more_than_some_with_unknown_ones():
    chain = [tie(("a", 1), ("b", 2)), tie(("b", 2), ("c", 3))]
    assert assigned(*chain, tie(("a", 4), ("d", KNOWN))) == {"a": 4, "b": 2, "c": 3}


def test_of_two_tensors_with_as_many_ties_none_is_taken():
    assert assigned(tie(("a", 1), ("b", 2)), tie(("a", 3), ("b", 2))) == {"b": 2}


def test_a_tensor_is_taken_for_one_tap():
    layers = [tie((f"{at}.out", 1), (f"{at}.norm", 2)) for at in range(2)]
    assert assigned(*layers) == {}
    assert assigned(*layers, tie(("1.norm", 2), ("1.q", 3))) == {"1.out": 1, "1.norm": 2, "1.q": 3}


def test_two_taps_for_one_result_are_one_tie():
    """A tensor times a constant: what several taps read of a norm, or the output of a product in another place."""
    read = [tie(("norm", 1), (f"{name}.input", 2)) for name in "qk"]
    assert assigned(*read, tie(("down", 1), ("mlp", 2))) == {}
