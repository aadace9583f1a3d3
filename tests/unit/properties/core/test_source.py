"""Values in programs are short to read, and equal values are told alike."""

import pytest

from harness.properties.core.subject import plain_text, spell


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([0, 1, 0], "[0, 1, 0]"),
        ([0] * 256, "[0] * 256"),
        ([0] * 255 + [1], "[0] * 255 + [1]"),
        ([2, 1] + [0] * 20 + [1] * 20 + [3], "[2, 1] + [0] * 20 + [1] * 20 + [3]"),
        ([0, 1] * 20, repr([0, 1] * 20)),
        ((1, 2), "(1, 2)"),
    ],
)
def test_long_lists_are_written_as_sums(value: object, text: str) -> None:
    assert spell(value) == text
    assert eval(spell(value)) == value


def test_equal_values_have_equal_texts() -> None:
    assert plain_text({3, 1, 2}) == plain_text({2, 3, 1})
    assert plain_text([{"b", "a"}, (1,)]) == plain_text([{"a", "b"}, (1,)])
    assert plain_text(object()) == plain_text(object())
    assert plain_text([1, 2]) != plain_text([2, 1])
