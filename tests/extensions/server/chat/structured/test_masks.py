"""Each fault of a mask is found and named; masks of the reference automaton have none; bad input is said clearly."""

import json

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="the extra `test` is not installed")
pytest.importorskip("llguidance", reason="the package llguidance is not installed (extra test)")

import harness
from harness.errors import HarnessError
from harness.extensions.server.chat.automaton import SPACING, Automaton
from harness.extensions.server.chat.masks import is_open, object_of
from harness.formats.checkpoint import HFTokenizer
from harness.report.document import document

SCHEMA = object_of({"a": {"type": "string"}})


@pytest.fixture(scope="module")
def hf(json_folder):
    return HFTokenizer.load(json_folder).hf


@pytest.fixture(scope="module")
def reference(hf):
    return Automaton(hf)


def changed(reference, hf, change, spacing="no whitespace"):
    """Return masks that a function changes: it gets the mask, the texts of all tokens and the text so far."""
    texts = [hf.decode([token_id]) for token_id in range(len(hf))]

    def mask(schema, token_ids):
        allowed_tokens = reference.allowed(schema, spacing, token_ids).copy()
        change(allowed_tokens, texts, hf.decode(token_ids), hf.eos_token_id)
        return allowed_tokens

    return mask


def where(is_so, value):
    def change(mask, texts, before, end):
        for at, text in enumerate(texts):
            if at != end and (mask[at] or value) and is_so(text, before):
                mask[at] = value

    return change


def ends(value):
    def change(mask, texts, before, end):
        mask[end] = value

    return change


def in_string(before):
    return before.replace('\\"', "").count('"') % 2 == 1


FAULTS = {
    "the answer may end before it is whole": ends(True),
    "a whole answer may not end": ends(False),
    "a special token is allowed": where(lambda text, before: text == "<|call|>", True),
    "the end of a string and more in the same token is masked": where(
        lambda text, before: in_string(before) and text in ('",', '"}', 'a"', '":'), False
    ),
    "an escape is masked": where(lambda text, before: in_string(before) and "\\" in text, False),
    "a part of a character is masked": where(lambda text, before: in_string(before) and "\ufffd" in text, False),
    "a character outside of ASCII is masked": where(lambda text, before: text == "\u00e9", False),
    "a control character in a string is allowed": where(lambda text, before: in_string(before) and text == "\n", True),
    "a part of a number is allowed": where(lambda text, before: before.endswith(":0") and text == "1", True),
    "a part of a number is masked": where(lambda text, before: not in_string(before) and text == "-", False),
    "whitespace between values is allowed": where(lambda text, before: before == "{" and text == " ", True),
    "an object and more in the same token is masked": where(lambda text, before: text == '{"', False),
    "the end of an object is allowed": where(lambda text, before: before.endswith(",") and text == "}", True),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_mask_with_a_fault(json_folder, hf, reference, name):
    report = harness.structured_output(changed(reference, hf, FAULTS[name]), model=json_folder, num_schemas=40)
    assert report.differences[0].name == name
    assert len(json.dumps(report.differences[0].data["schema"])) < 300
    assert report.notes == ("whitespace: no whitespace, the convention that fits best",)
    assert not report


@pytest.mark.parametrize("spacing", SPACING)
def test_masks_of_the_reference(json_folder, reference, spacing):
    def mask(schema, token_ids):
        return np.flatnonzero(reference.allowed(schema, spacing, token_ids)).tolist()

    report = harness.structured_output(mask, model=json_folder, num_schemas=20, seed=7)
    report.assert_ok()
    assert report.notes[0].startswith(f"whitespace: {spacing}, ")
    assert report.counts["mask"] > 200
    assert document(report)["verdict"] == "pass"


def test_schemas_of_the_user_and_the_report(json_folder, hf, reference):
    mask = changed(reference, hf, FAULTS["an escape is masked"])
    report = harness.structured_output(mask, model=json_folder, schemas=[SCHEMA])
    assert report.counts["schema"] == 1
    text = str(report)
    assert "  H257  an escape is masked\n        schema    {" in text
    assert "        so far    '{" in text
    with pytest.raises(AssertionError, match="H257"):
        report.assert_ok()


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (lambda *_: 1 / 0, "the mask raises ZeroDivisionError: division by zero"),
        (lambda *_: "x", "the mask raises TypeError: neither ids nor a boolean for each of 273 tokens: 'x'"),
        (lambda *_: None, "the mask raises TypeError: neither ids nor a boolean for each of 273 tokens: None"),
        (lambda *_: [-1], "the mask raises TypeError: neither ids nor a boolean for each of 273 tokens: [-1]"),
        (lambda *_: [0.5], "the mask raises TypeError: neither ids nor a boolean for each of 273 tokens: [0.5]"),
        (lambda *_: [], "an object is masked"),
    ],
)
def test_masks_of_another_form(json_folder, mask, name):
    report = harness.structured_output(mask, model=json_folder, schemas=[SCHEMA])
    assert report.differences[0].name == name


def test_a_mask_that_hangs(json_folder):
    def mask(schema, token_ids):
        while True:
            pass

    report = harness.structured_output(mask, model=json_folder, limit_s=0.2, num_schemas=5)
    assert [difference.name for difference in report.differences] == ["a mask does not end within 0.2 s"]


def test_a_schema_that_no_automaton_takes(json_folder):
    for schema in ({"type": "objectx"}, {"type": "array", "items": {"$ref": "#/nowhere"}}):
        with pytest.raises(HarnessError, match="H258: the reference automaton does not take the schema") as caught:
            harness.structured_output(lambda *_: [], model=json_folder, schemas=[schema])
        assert caught.value.exit_status == 2


def test_any_tokens_of_a_certain_text_are_allowed(hf, reference):
    def allowed(token_ids):
        return {
            hf.decode([token_id]) for token_id in np.flatnonzero(reference.allowed(SCHEMA, "no whitespace", token_ids))
        }

    assert allowed([]) == {"{", '{"'}
    assert allowed(hf.convert_tokens_to_ids(["{", '"'])) == {"a", 'a"'}


@pytest.mark.parametrize(
    ("before", "token", "is_so"),
    [
        ('{"a":"', "\\/", True), ('{"a":"\\', "/", True), ('{"a":"\\u', "1", True), ('{"a":"\\u12', "34x", True),
        ('{"a":"', "\x7f", True), ('{"a":"\\', "q", False), ('{"a":"\\u', "g", False), ('{"a":"', "b", False),
        ('{"a":"\\\\', "b", False), ('{"a":', "\\", False), ('{"a":"', '\\n"', True), ('{"a":"', "\\x", False),
    ],
)  # fmt: skip
def test_escapes_that_json_has_may_be_allowed(before, token, is_so):
    assert is_open(before, token, is_allowed=True) is is_so
