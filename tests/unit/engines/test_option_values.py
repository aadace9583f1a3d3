"""Values of engine options."""

import pytest

from harness.engines.adapter import parse_flag, parse_value
from harness.errors import Code, HarnessError


def test_a_flag_is_true_or_false():
    assert (parse_flag("x", "true"), parse_flag("x", "false")) == (True, False)
    with pytest.raises(HarnessError) as caught:
        parse_flag("multiprocessing", "yes")
    assert caught.value.code is Code.BAD_OPTION
    assert (caught.value.what, caught.value.actual) == ("multiprocessing must be true or false", "yes")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("0.5", 0.5),
        ("true", True),
        ("None", None),
        ("False", False),
        ('{"a": [1]}', {"a": [1]}),
        ("fp8", "fp8"),
    ],
)
def test_a_value_is_json_where_it_is_json(text, value):
    assert parse_value(text) == value
