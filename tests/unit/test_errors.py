"""Codes, messages and pages: what a reader of an error can rely on."""

import re
from pathlib import Path

import pytest

from harness.errors import Code, ExitStatus, HarnessError, exit_status

PAGES = Path(__file__).parents[2] / "docs" / "errors"
EXIT_STATUSES = {
    Code.NOT_A_CHECKPOINT: ExitStatus.BAD_INPUT,
    Code.STEP_ALTERED: ExitStatus.BAD_INPUT,
    Code.SKETCH_MISSING: ExitStatus.BAD_INPUT,
    Code.SKETCH_DIFFERS: ExitStatus.MISMATCH,
    Code.LOCAL_ERROR: ExitStatus.MISMATCH,
    Code.TRIGGER_NOT_REACHED: ExitStatus.MISMATCH,
    Code.NOTHING_CHECKED: ExitStatus.NOTHING_CHECKED,
    Code.INTERNAL: ExitStatus.INTERNAL,
}


def test_a_message_says_what_where_expected_actual_and_what_to_try():
    error = HarnessError(
        Code.TOKEN_OUTSIDE_VOCABULARY,
        "token id 300 is outside the vocabulary",
        where="request 0, position 4",
        expected="0 to 255",
        actual=300,
        hint="tokenize again",
    )
    assert str(error) == (
        "H010: token id 300 is outside the vocabulary\n"
        "  where:    request 0, position 4\n"
        "  expected: 0 to 255\n"
        "  actual:   300\n"
        "  try:      tokenize again"
    )
    assert error.exit_status is ExitStatus.BAD_INPUT


def test_a_message_leaves_out_what_is_unknown_and_keeps_zero():
    assert str(HarnessError(Code.EMPTY_PROMPT, "the prompt has no token")) == "H011: the prompt has no token"
    assert str(HarnessError(Code.BAD_OPTION, "too few", actual=0)) == "H013: too few\n  actual:   0"


@pytest.mark.parametrize(("code", "status"), EXIT_STATUSES.items())
def test_exit_status(code: Code, status: ExitStatus):
    assert exit_status(code) is status


def test_codes_are_unique_and_well_formed():
    names = Code.__members__
    assert len(names) == len(set(Code)), "two names share a code"
    assert all(re.fullmatch(r"H\d{3}", code) for code in Code)


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_page(code: Code):
    page = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {code}: ")
    assert f"`{code.name}`, exit status {int(exit_status(code))}." in page
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == ["Symptom", "Cause", "Fix", "Next command"]
    symptom = page.partition("## Symptom")[2].partition("## Cause")[0]
    assert code in symptom, "the symptom shows another code"
    command = page.partition("## Next command")[2]
    assert re.fullmatch(r"\s*```bash\n(HARNESS_CACHE=\S+ )?(harness|pytest) .+\n```\n", command)


def test_every_page_has_a_code():
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == set(Code)


def test_the_index_lists_every_code_once_with_its_exit_status():
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(H\d+)\]\((H\d+)\.md\) \| `(\w+)` \| .+ \| (\d) \|$", index, re.MULTILINE)
    assert rows == [(code, code, code.name, str(int(exit_status(code)))) for code in Code]


def test_links_between_pages_lead_somewhere():
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\((\S+?)\)", page.read_text(encoding="utf-8")):
            assert (PAGES / target).is_file(), f"{page.name} links to {target}"
