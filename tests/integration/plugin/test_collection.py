"""What is a case, what is none, and what a broken one looks like."""

import pytest

pytest_plugins = ["pytester"]


def test_a_case_is_one_item_with_a_stable_node_id(project: pytest.Pytester) -> None:
    result = project.runpytest("--collect-only", "-q")
    result.stdout.fnmatch_lines(["cases/tiny.toml::check", "*1 test collected*"])


def test_a_case_runs_by_its_node_id(project: pytest.Pytester) -> None:
    project.runpytest("cases/tiny.toml::check").assert_outcomes(passed=1)


@pytest.mark.parametrize("expression", ["tiny", "float32", "reference and not hf", "tiny.toml"])
def test_k_selects_by_file_dtype_and_engine(project: pytest.Pytester, expression: str) -> None:
    project.runpytest("--collect-only", "-q", "-k", expression).stdout.fnmatch_lines(["cases/tiny.toml::check"])


def test_k_deselects(project: pytest.Pytester) -> None:
    result = project.runpytest("--collect-only", "-q", "-k", "bfloat16")
    result.assert_outcomes(deselected=1)
    result.stdout.no_fnmatch_line("*tiny*")


def test_cases_and_python_tests_live_together(project: pytest.Pytester) -> None:
    project.makepyfile("def test_own(): pass")
    project.runpytest("-k", "own").assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize("path", ["theirs.toml", "other/tiny.toml", "cases/below/tiny.toml"])
def test_toml_files_elsewhere_are_left_alone(project: pytest.Pytester, path: str) -> None:
    target = project.path / path
    target.parent.mkdir(exist_ok=True)
    target.write_text("this is = = no toml")
    result = project.runpytest("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*1 test collected*"])


@pytest.mark.parametrize("path", ["theirs.toml", "cases/below/tiny.toml"])
def test_a_file_that_looks_like_a_case_and_is_none_is_a_warning(
    project: pytest.Pytester, case_text: str, path: str
) -> None:
    target = project.path / path
    target.parent.mkdir(exist_ok=True)
    target.write_text(case_text)
    reason = "its folder is not called 'cases'"
    result = project.runpytest("--collect-only", "-q", "-W", "default")
    result.stdout.fnmatch_lines([f"*{path} looks like a case, and is not collected: {reason}*"])


def test_a_case_with_another_ending_is_a_warning_unless_it_is_a_copy(project: pytest.Pytester, case_text: str) -> None:
    for name in ("nightly.toml.txt", "tiny.toml.orig"):
        (project.path / "cases" / name).write_text(case_text)
    result = project.runpytest("--collect-only", "-q", "-W", "default")
    reason = "its name does not end in .toml"
    result.stdout.fnmatch_lines([f"*nightly.toml.txt looks like a case, and is not collected: {reason}"])
    result.stdout.no_fnmatch_line("*tiny.toml.orig*")


def test_a_file_in_cases_with_other_keys_of_a_case_is_a_warning(project: pytest.Pytester, case_text: str) -> None:
    text = case_text.replace("schema_version = 1", "").replace("requests", "request")
    (project.path / "cases" / "misspelt.TOML").write_text(text)
    result = project.runpytest("--collect-only", "-q", "-W", "default")
    result.stdout.fnmatch_lines(["*misspelt.TOML has keys of a case (*model*), and is not collected*"])


@pytest.mark.parametrize("text", ["", "[settings]\nname = 'theirs'\n", "# schema_version = 1\n", "no toml at all"])
def test_a_foreign_toml_in_a_folder_named_cases_is_left_alone(project: pytest.Pytester, text: str) -> None:
    (project.path / "cases" / "theirs.toml").write_text(text)
    result = project.runpytest("--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 test collected*"])


@pytest.mark.parametrize(
    "quoted", ['"schema_version" = 1', "'schema_version' = 1", 'schema_version=1 # "a"', '"schema_version"\t= 1']
)
def test_a_case_with_quoted_keys_is_a_case(project: pytest.Pytester, case_text: str, quoted: str) -> None:
    text = case_text.replace("schema_version = 1", quoted).replace("[[requests]]", '[[ "requests" ]]')
    (project.path / "cases" / "quoted.toml").write_text(text)
    result = project.runpytest("--collect-only", "-q")
    result.stdout.fnmatch_lines(["cases/quoted.toml::check", "*2 tests collected*"])


def test_a_case_in_another_encoding_is_an_error_and_not_left_out(project: pytest.Pytester, case_text: str) -> None:
    (project.path / "cases" / "wide.toml").write_text(case_text, encoding="utf-16")
    result = project.runpytest("--collect-only")
    result.stdout.fnmatch_lines(["*ERROR collecting cases/wide.toml*", "H018: *"])


def test_the_ini_option_names_more_cases(project: pytest.Pytester, case_text: str) -> None:
    for name in ("conformance/a.toml", "conformance/b.txt", "one/exactly.toml", "one/other.toml"):
        (project.path / name).parent.mkdir(exist_ok=True)
        (project.path / name).write_text(case_text)
    result = project.runpytest(
        "--collect-only", "-q", "-W", "default", "-o", "harness_cases=conformance/*.toml\none/exactly.toml"
    )
    result.stdout.fnmatch_lines(
        ["cases/tiny.toml::check", "conformance/a.toml::check", "one/exactly.toml::check", "*3 tests collected*"]
    )


def test_a_file_that_the_ini_option_names_must_be_a_case(project: pytest.Pytester) -> None:
    project.mkdir("conformance").joinpath("theirs.toml").write_text("name = 'theirs'\n")
    result = project.runpytest("--collect-only", "-o", "harness_cases=conformance/*.toml")
    result.stdout.fnmatch_lines(["H018: *"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema_version = 2\n", "H018: schema_version: *"),
        ("schema_version = 1\nmodel = \n", "H018: the case cannot be read: *"),
        ("schema_version = 1\nmodel = 'm'\nmax_new_token = 3\n", "H018: *"),
        ("[[requests]]\nprompt = 'hello'\n", "H018: *"),
        ("schema_version = 1\nmodel = 'm'\nschedules = ['wild']\n[[requests]]\nprompt = 'x'\n", "H018: *wild*"),
    ],
)
def test_a_broken_case_is_a_collection_error_without_traceback(
    project: pytest.Pytester, text: str, message: str
) -> None:
    (project.path / "cases" / "broken.toml").write_text(text)
    result = project.runpytest("--collect-only")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting cases/broken.toml*", message, "* 1 error*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*.py:*")


def test_collecting_broken_cases_does_not_stop_the_sound_ones(project: pytest.Pytester) -> None:
    (project.path / "cases" / "broken.toml").write_text("schema_version = 2\n")
    project.runpytest("--continue-on-collection-errors").assert_outcomes(passed=1, errors=1)
