"""The plugin is imported in every session of everybody who has the harness: it must cost nothing."""

import sys

import pytest

pytest_plugins = ["pytester"]

HEAVY = ("torch", "transformers", "rich", "pydantic", "numpy", "safetensors", "tabulate", "reference_engine")


def test_a_session_without_cases_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_imports():
            assert "harness.pytest_plugin" in sys.modules
            assert [name for name in {HEAVY!r} if name in sys.modules] == []
        """
    )
    pytester.makefile(".toml", other="[table]")
    pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:anyio").assert_outcomes(passed=1)


def test_collecting_a_case_does_not_import_torch(project: pytest.Pytester) -> None:
    project.makeconftest(
        """
        import sys

        def pytest_collection_finish(session):
            assert len(session.items) == 1
            assert not {"torch", "transformers", "rich"} & sys.modules.keys()
        """
    )
    assert project.runpytest_subprocess("--collect-only").ret == 0


def test_importing_the_plugin_loads_nothing_heavy(pytester: pytest.Pytester) -> None:
    program = "import sys, harness.pytest_plugin; print(sorted(set(sys.argv[1:]) & sys.modules.keys()))"
    result = pytester.run(sys.executable, "-c", program, *HEAVY)
    assert result.outlines == ["[]"]
