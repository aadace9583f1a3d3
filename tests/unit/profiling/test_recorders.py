"""The profiler around a block: what torch says of it, and to whom."""

import warnings

import pytest
from torch.profiler import ProfilerActivity, profile

from harness.profiling.tracing import profiling


@pytest.mark.parametrize("is_torchs_own", [True, False])
def test_only_torchs_warning_of_cycles_is_kept_from_the_user(is_torchs_own):
    text = "Warning: Profiler clears events at the end of each cycle." if is_torchs_own else "something else"
    profiler = profile(activities=[ProfilerActivity.CPU])
    seen = []
    with profiling(profiler):
        profiler.start()
        try:
            warnings.warn(text, stacklevel=1)  # an error under pytest, where nobody ignores it
        except UserWarning as warning:
            seen.append(str(warning))
    assert seen == ([] if is_torchs_own else [text])
