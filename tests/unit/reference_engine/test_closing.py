"""A closed engine: its memory is free at once, without the garbage collector, and it says that it is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.errors import RequestError

PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("backend", ["paged", "contiguous", "recompute"])
def test_weights_and_cache_are_freed_at_once(checkpoint: Any, backend: str) -> None:
    config = EngineConfig(max_model_len=32, max_num_seqs=2, attention_backend=backend)
    assert_freed_at_once(checkpoint.folder, config, lambda engine: None)


def assert_freed_at_once(folder: Any, config: EngineConfig, prepare: Callable[[LLMEngine], object]) -> None:
    with LLMEngine(folder, config) as engine:
        prepare(engine)
        engine.generate([[5, 6, 7]], PARAMS)
        engine.add_request([5, 6], PARAMS)
        engine.step()
        model, cache = engine.runner.model, engine.backend.cache
        held = {"norm": model.norm.weight_X, "head": model.lm_head.weight_OI}
        held |= {} if cache is None else {"cache": cache.data}
        alive = {name: weakref.ref(tensor) for name, tensor in held.items()}
        del model, cache, held
        assert all(reference() is not None for reference in alive.values())
    assert {name for name, reference in alive.items() if reference() is not None} == set()


def test_a_closed_engine_says_so(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32))
    request = engine.add_request([5, 6, 7], PARAMS)
    engine.close()
    engine.close()
    assert not engine.has_unfinished()
    assert engine.step() == []
    for call in (lambda: engine.add_request([5]), lambda: engine.generate([[5]])):
        with pytest.raises(RequestError, match=r"the engine is closed, in LLMEngine\. Open another one\."):
            call()
    with pytest.raises(RequestError, match="no such unfinished request"):
        engine.abort(request)


def test_it_is_closed_when_the_block_fails(checkpoint: Any) -> None:
    with pytest.raises(ZeroDivisionError), LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32)) as engine:
        raise ZeroDivisionError
    assert not hasattr(engine.runner, "model")
    with pytest.raises(RequestError, match="closed"):
        engine.add_request([5])
