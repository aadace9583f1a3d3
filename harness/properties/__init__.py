"""Property suites for any block manager, scheduler, attention and engine (docs/test-your-engine.md).

    pytest --pyargs harness.properties --block-manager my.module:Adapter

Hypothesis makes the inputs; it comes with the extra `test`.

Raises:
    HarnessError: Hypothesis is not installed.
"""

from importlib.util import find_spec

from harness.errors import Code, HarnessError

if find_spec("hypothesis") is None:
    raise HarnessError(
        Code.NO_HYPOTHESIS,
        "the property suites need Hypothesis",
        where="harness.properties",
        hint="pip install -e '.[test]' in the harness's checkout",
    )
