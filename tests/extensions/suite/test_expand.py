"""Cases times a matrix: names, labels, rules; what makes no sense is said before the first task."""

from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite.matrix import expand, load_matrix

CASE = """
schema_version = 1
model = "qwen3-tiny"
dtype = "float32"
schedules = ["plain"]
engine_options = {block_size = 8}
[[requests]]
token_ids = [1, 2, 3]
"""


@pytest.fixture
def cases(tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.toml").write_text(CASE)
    return folder


@pytest.fixture
def expanded(tmp_path, cases):
    def expand_with(text: str, files=None):
        path = tmp_path / "matrix.toml"
        path.write_text(text)
        return expand([cases] if files is None else files, load_matrix(path), where=path)

    return expand_with


def test_without_a_matrix_the_cases_are_those_of_the_files_by_name(cases):
    cases_of_suite = expand([cases, cases / "a.toml"])
    assert [case.name for case in cases_of_suite] == ["a", "b"]
    assert cases_of_suite[0].labels == {
        "case": "a", "model": "qwen3-tiny", "engine": "reference", "dtype": "float32", "schedule": "plain",
        "prompts": "own",
    }  # fmt: skip


def test_every_value_of_an_axis_meets_every_other(expanded):
    cases_of_suite = expanded(
        """
        dtype = ["float32", "bfloat16"]
        engine = ["hf", {name = "small", engine = "reference", options = {block_size = 1}}]
        schedule = ["plain,batched"]
        """
    )
    assert len(cases_of_suite) == 2 * 2 * 2
    assert [case.name for case in cases_of_suite][:4] == [
        "a[hf,float32,plain,batched]", "a[hf,bfloat16,plain,batched]",
        "a[small,float32,plain,batched]", "a[small,bfloat16,plain,batched]",
    ]  # fmt: skip
    assert cases_of_suite[2].case.engine == "reference"
    assert cases_of_suite[2].case.engine_options == {"block_size": "1"}
    assert cases_of_suite[0].case.engine_options == {}, "another engine has other options"
    assert cases_of_suite[0].case.schedules == ["plain", "batched"]
    assert cases_of_suite[2].labels["engine"] == "small"


def test_a_matrix_with_models_and_prompts_needs_no_case(expanded, tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    text = """
        model = ["models/mine", "qwen3-tiny"]
        [prompts.short]
        requests = [{token_ids = [1]}]
        [prompts.long]
        requests = [{token_ids = [1, 2, 3]}]
        max_new_tokens = 9
    """
    cases_of_suite = expanded(text, [])
    assert [case.name for case in cases_of_suite] == [
        "matrix[mine,short]", "matrix[mine,long]", "matrix[qwen3-tiny,short]", "matrix[qwen3-tiny,long]",
    ]  # fmt: skip
    assert cases_of_suite[0].case.model == str(tmp_path / "models" / "mine")
    assert cases_of_suite[1].case.max_new_tokens == 9
    assert cases_of_suite[0].golden_digest() != cases_of_suite[1].golden_digest()


def test_engine_and_schedule_do_not_make_another_golden(expanded):
    cases_of_suite = expanded('engine = ["hf", "reference"]\nschedule = ["plain", "batched"]')
    assert len({case.golden_digest() for case in cases_of_suite}) == 1
    assert len({case.digest() for case in cases_of_suite}) == 4, "the files hold the same case"


def test_the_last_rule_that_says_it_counts(expanded):
    cases_of_suite = expanded(
        """
        engine = ["hf", "reference"]
        exclude = [{case = "b"}]
        [[rules]]
        cpus = 2
        time_limit_s = 60
        [[rules]]
        where = {engine = "hf"}
        cpus = 4
        gpus = 1
        environment = "old"
        [environments.old]
        python = "/opt/old/bin/python"
        """
    )
    hf, reference = cases_of_suite
    assert (hf.resources.cpus, hf.resources.gpus, hf.time_limit_s, hf.environment) == (4, 1, 60, "old")
    assert (reference.resources.cpus, reference.resources.gpus, reference.environment) == (2, 0, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rules]]\nwhere = {engine = 'vlm'}", "no case has the engine 'vlm'"),
        ("exclude = [{dtype = 'float8'}]", "no case has the dtype 'float8'"),
        ("exclude = [{colour = 'red'}]", "no case has the colour 'red'"),
        ("[[rules]]\nenvironment = 'none'", "the environment 'none', which is not there"),
        ("engines = ['hf']", "engines"),
        ("dtype = ['float8']", "dtype.0"),
        ("schedule = ['sideways']", "schedule: unknown schedule 'sideways'"),
        ("dtype = ['float32', 'float32']", "two cases have one name"),
        ("model = ['a/x', 'b/x']", "two cases have one name"),
        ("exclude = [{case = 'a'}, {case = 'b'}]", "the suite has no case"),
        ("model = [", "cannot be read"),
        ("[[rules]]\ncpus = 0", "rules.0.cpus"),
        ("[[rules]]\ntime_limit_s = nan", "rules.0.time_limit_s"),
    ],
)
def test_a_matrix_that_makes_no_sense_is_said(expanded, text, says):
    with pytest.raises(HarnessError) as caught:
        expanded(text)
    assert caught.value.code is Code.BAD_SUITE
    assert says in str(caught.value)


def test_two_files_of_one_name_are_both_said(cases, tmp_path):
    another = tmp_path / "other" / "a.toml"
    another.parent.mkdir()
    another.write_text(CASE)
    with pytest.raises(HarnessError, match="two cases have one name") as caught:
        expand([cases, another])
    assert caught.value.actual == f"{cases / 'a.toml'} and {another}"


@pytest.mark.parametrize(
    ("text", "says"),
    [("model = ['a/x', 'b/x']", "a/x and b/x"), ("dtype = ['float32', 'float32']", "two values of one axis")],
)
def test_two_values_of_one_name_are_both_said(expanded, text, says):
    with pytest.raises(HarnessError) as caught:
        expanded(text)
    assert caught.value.actual == says


@pytest.mark.parametrize("files", [[], ["empty"]])
def test_nothing_to_run_is_an_error(tmp_path, files):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError) as caught:
        expand([tmp_path / name for name in files])
    assert caught.value.code is Code.BAD_SUITE


def test_the_documentations_matrix_is_one(tmp_path, monkeypatch, cases):
    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
    (tmp_path / "matrix.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    cases_of_suite = {case.name: case for case in expand([cases / "a.toml"], load_matrix(tmp_path / "matrix.toml"))}
    assert len(cases_of_suite) == 2 * 2 * 2 * 2 * 2 - 8
    chosen = cases_of_suite["a[8b,paged,bfloat16,plain,short]"]
    assert (chosen.resources.gpus, chosen.environment, chosen.time_limit_s) == (1, "mine", 600)
