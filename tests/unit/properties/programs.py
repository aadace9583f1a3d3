"""Programs of findings, run as their reader would run them."""

import pytest


def assert_fails_in_its_last_line(program: str, target: type, *, most_lines: int = 25) -> None:
    lines = program.splitlines()
    assert len(lines) <= most_lines
    assert "hypothesis" not in program
    assert lines[0] == f"from {target.__module__} import {target.__name__}"
    lines[0] = ""  # the test's own modules have no path of import
    code = compile("\n".join(lines), "program", "exec")
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the code under test raises
        exec(code, {target.__name__: target})
    in_program = next(entry for entry in caught.traceback if str(entry.path) == "program")
    assert in_program.lineno + 1 == len(lines)
