"""Optional parameters are seen whatever form the attention has: a bug behind each of them is found."""

from itertools import product
from typing import Any

import pytest
from hypothesis import settings

from harness.properties.attention.subject import AttentionUnderTest, not_checked
from harness.properties.attention.suite import check_definition
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES

from . import forms

DEV = PROFILES["dev"].settings()
FEW = settings(DEV, max_examples=5)


def adapter(form: str, broken: str = "") -> NamedAdapter:
    """Return what the option `--attention` names as `module:name`."""
    name = f"{form}_{broken}"
    return NamedAdapter.at(f"{forms.__name__}:{name}", getattr(forms, name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "keyword"), list(product(forms.FORMS, forms.KEYWORDS)))
def test_a_bug_behind_a_keyword_is_found(form: str, keyword: str) -> None:
    with pytest.raises(PropertyError) as caught:
        check_definition(adapter(form, keyword), DEV, forms.KEYWORDS[keyword])
    with pytest.raises(AssertionError):
        exec(compile(caught.value.program, "program", "exec"), {})


@pytest.mark.parametrize("form", forms.FORMS)
def test_every_form_offers_every_keyword_and_passes_without_a_bug(form: str) -> None:
    assert AttentionUnderTest(adapter(form)).served.keywords == frozenset(forms.KEYWORDS)
    for focus in ("any", *forms.KEYWORDS.values()):
        check_definition(adapter(form), FEW, focus)


@pytest.mark.parametrize(
    ("named", "line"),
    [
        (forms.class_window, "attention = class_window()"),
        (forms.Wrong().attend_to, "attention = Wrong().attend_to"),
        (forms.Wrong(), "attention = Wrong()"),
        (forms.partial_window, "attention = partial(with_broken, 'window')"),
    ],
)
def test_an_object_without_a_path_is_written_as_it_is_made(named: Any, line: str) -> None:
    assert AttentionUnderTest(named).opening()[-1] == line


def test_parameters_behind_kwargs_are_said_not_to_be_checked() -> None:
    check_definition(forms.hidden_parameters, FEW, "decode")
    assert (
        "attention: a sliding window: the signature of attend hides its parameters; say keywords = ('window',) if it "
        "takes it"
    ) in not_checked(forms.hidden_parameters, size_seed=1)


def test_parameters_behind_kwargs_are_checked_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.hidden_parameters, "keywords", ("window",), raising=False)
    assert not any("sliding window" in line for line in not_checked(forms.hidden_parameters, size_seed=1))
    with pytest.raises(PropertyError):
        check_definition(forms.hidden_parameters, DEV, "window")
