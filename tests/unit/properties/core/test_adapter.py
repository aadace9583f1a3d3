"""What an option may name, how a program imports it, and which parameters it has."""

from functools import partial
from typing import Any

import pytest

from harness.properties.core.falsify import NamedAdapter, hides_parameters, takes


class Made:
    keywords = ("salt",)
    sizes = (1, 2)

    def __init__(self, *, hash_bits: int | None = None) -> None:
        pass

    def method(self, *, salt: str = "") -> None:
        pass

    def open(self, **options: Any) -> None:
        pass

    class Inner:
        pass


def function(*, salt: str = "") -> None:
    pass


@pytest.mark.parametrize(
    ("named", "imports", "expression"),
    [
        (Made, (f"from {__name__} import Made",), "Made"),
        (Made.Inner, (f"from {__name__} import Made",), "Made.Inner"),
        (Made(), (f"from {__name__} import Made",), "Made()"),
        (Made().method, (f"from {__name__} import Made",), "Made().method"),
        (function, (f"from {__name__} import function",), "function"),
        (
            partial(Made, hash_bits=2),
            ("from functools import partial", f"from {__name__} import Made"),
            "partial(Made, hash_bits=2)",
        ),
    ],
)
def test_a_program_imports_what_is_named(named: Any, imports: tuple[str, ...], expression: str) -> None:
    adapter = NamedAdapter.of(named)
    assert (adapter.imports, adapter.expression) == (imports, expression)


def test_a_path_is_imported_as_it_was_given() -> None:
    adapter = NamedAdapter.at("my.module:make.inner", partial(Made))
    assert (adapter.imports, adapter.expression) == (("from my.module import make",), "make.inner")
    assert NamedAdapter.of(adapter) is adapter


@pytest.mark.parametrize("named", [Made, partial(Made, hash_bits=None), partial(partial(Made))])
def test_a_class_is_made_whatever_is_bound_already(named: Any) -> None:
    adapter = NamedAdapter.of(named)
    assert adapter.is_class
    assert adapter.takes("hash_bits")
    assert adapter.declares("sizes") == (1, 2)
    assert adapter.declares("nothing", "default") == "default"


@pytest.mark.parametrize("callable_", [function, Made().method, partial(function), lambda *, salt="": None])
def test_a_parameter_is_seen(callable_: Any) -> None:
    assert takes(callable_, "salt")
    assert not takes(callable_, "pepper")
    assert not hides_parameters(callable_)


def test_a_signature_that_cannot_be_read_hides_parameters() -> None:
    assert hides_parameters(Made().open)
    assert hides_parameters(max)
    assert not takes(Made().open, "salt")
    assert not takes(max, "salt")
