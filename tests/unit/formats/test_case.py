"""Case files: what they may say, and what replaces it."""

from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.formats.case import Case, RequestSpec, load_case
from harness.formats.checkpoint import embedded_cases

HEAD = 'schema_version = 1\nmodel = "qwen"\n'
REQUESTS = "[[requests]]\ntoken_ids = [1, 2]\n"


@pytest.fixture
def write(tmp_path):
    def call(text):
        (tmp_path / "case.toml").write_text(text)
        return tmp_path / "case.toml"

    return call


@pytest.mark.parametrize("path", sorted(embedded_cases().glob("*.toml")), ids=lambda path: path.stem)
def test_the_cases_that_ship_are_sound(path):
    case = load_case(path)
    assert case.description
    assert Path(case.model).parent == embedded_cases() / "checkpoints"


def test_what_is_not_said_has_a_default(write):
    case = load_case(write(HEAD + REQUESTS))
    assert (case.engine, case.dtype, case.device, case.max_new_tokens) == ("reference", "auto", "cpu", 24)
    assert (case.schedules, case.require, case.engine_options) == ([], [], {})


def test_a_model_beside_the_file_is_a_path_and_another_is_a_hub_id(write, tmp_path):
    assert load_case(write(HEAD + REQUESTS)).model == "qwen"
    (tmp_path / "qwen").mkdir()
    assert load_case(write(HEAD + REQUESTS)).model == str(tmp_path / "qwen")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version = 1", "model"),
        (HEAD, "requests"),
        (HEAD + "requests = []", "requests"),
        (HEAD.replace("1", "2") + REQUESTS, "schema_version"),
        (HEAD + "max_new_token = 3\n" + REQUESTS, "max_new_token: Extra inputs"),
        (HEAD + "max_new_tokens = 0\n" + REQUESTS, "max_new_tokens"),
        (HEAD + 'max_new_tokens = "4"\n' + REQUESTS, "max_new_tokens"),
        (HEAD + 'dtype = "float8"\n' + REQUESTS, "dtype"),
        (HEAD + 'schedules = ["fancy"]\n' + REQUESTS, "schedules: unknown schedule 'fancy'"),
        (HEAD + 'require = ["luck"]\n' + REQUESTS, "require"),
        (HEAD + "[[requests]]\n", "one of prompt, messages and token_ids"),
        (HEAD + '[[requests]]\nprompt = "a"\ntoken_ids = [1]\n', "one of prompt, messages and token_ids"),
        (HEAD + '[[requests]]\nprompt = "a"\ntools = []\n', "tools are for messages"),
        (HEAD + "[[requests]]\ntoken_ids = [1.5]\n", "requests.0.token_ids.0"),
        (HEAD + 'engine = ""\n' + REQUESTS, "engine: String should have at least 1 character"),
        (HEAD.replace("qwen", "") + REQUESTS, "model: String should have at least 1 character"),
        (HEAD + 'lora = "adapter"\n' + REQUESTS, "lora: case files must not set this field"),
        (HEAD + 'engine_python = "bin/python"\n' + REQUESTS, "leave it out, and use --engine-python"),
        ("=", "cannot be read"),
        ("a = " + "[" * 100_000, "cannot be read"),
    ],
)
def test_a_case_that_cannot_be_used_is_refused_by_name(write, text, words):
    path = write(text)
    with pytest.raises(HarnessError) as caught:
        load_case(path)
    assert caught.value.code is Code.BAD_CASE
    assert caught.value.where == path
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_case_that_is_not_there_or_no_text(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nowhere.toml", tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(HarnessError) as caught:
            load_case(path)
        assert caught.value.code is Code.BAD_CASE


@pytest.fixture
def case():
    return Case(
        schema_version=1,
        model="qwen",
        dtype="bfloat16",
        engine="mine",
        engine_options={"block_size": 4, "graphs": "off"},
        schedules=["plain"],
        require=["block_boundary"],
        requests=[RequestSpec(token_ids=[1], max_new_tokens=3), RequestSpec(prompt="a")],
    )


def test_nothing_given_replaces_nothing(case):
    assert case.replaced() == case
    assert case.replaced(engine="mine", schedules=["plain"], model="qwen") == case


def test_what_is_no_field_of_a_case_is_refused(case):
    with pytest.raises(TypeError, match="a case has no field 'shedules'"):
        case.replaced(shedules=["plain"])


def test_what_is_given_replaces_also_by_a_default(case):
    assert case.replaced(dtype="auto").dtype == "auto"
    assert case.replaced(engine="reference").engine == "reference"
    assert case.replaced(device="cpu").device == "cpu"
    assert case.replaced(schedules=["batched"]).schedules == ["batched"]
    assert case.replaced(model="llama").model == "llama"
    assert case.replaced(requests=[RequestSpec(token_ids=[5])]).requests == [RequestSpec(token_ids=[5])]


def test_a_number_of_new_tokens_is_for_every_request(case):
    replaced = case.replaced(max_new_tokens=5)
    assert replaced.max_new_tokens == 5
    assert [request.max_new_tokens for request in replaced.requests] == [None, None]


def test_options_are_added_to_the_same_engines_and_not_to_anothers(case):
    assert case.replaced(engine_options={"graphs": "on"}).engine_options == {"block_size": 4, "graphs": "on"}
    assert case.replaced(engine="mine").engine_options == case.engine_options
    assert case.replaced(engine="hf").engine_options == {}
    assert case.replaced(engine="hf", engine_options={"attention": "eager"}).engine_options == {"attention": "eager"}


def test_requirements_go_with_what_they_were_made_for(case):
    assert case.replaced(dtype="float16", device="cuda").require == ["block_boundary"]
    for change in (
        {"model": "llama"}, {"engine": "hf"}, {"engine_options": {"block_size": "8"}}, {"max_new_tokens": 2},
        {"schedules": ["batched"]}, {"requests": [RequestSpec(token_ids=[5])]},
    ):  # fmt: skip
        assert case.replaced(**change).require == []
