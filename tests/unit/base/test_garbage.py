"""Whoever keeps the garbage collector still finds it as it was."""

import gc

import pytest

from harness.base.memory import collecting_no_garbage


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_before_after_an_exception(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collecting_no_garbage():
            assert not gc.isenabled()
        with pytest.raises(KeyError), collecting_no_garbage():
            raise KeyError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
