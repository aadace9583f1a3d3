"""What is mutated, and the tests that should notice: those of the module, or those that are named here.

A package's whole tests take minutes, and each survivor would take all of them: what survives its module's tests is run
against the whole package by `--all-tests`.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
_RECORDING = ("test_recording.py", "test_recording_failures.py", "test_recording_hostile.py")
_RECORDING_OWN = {"merge": ("test_merge_ranks.py",)}
_ENGINE = {
    "scheduler": ("test_scheduler.py", "test_engine.py"),
    "block_pool": ("test_block_pool.py", "test_block_manager.py", "test_engine_sharing.py"),
    "prefix_cache": ("test_prefix_cache.py", "test_block_pool.py", "test_engine_sharing.py"),
    "sampler": ("test_sampler.py", "test_engine.py"),
    "parallel/ranks": ("test_parallel.py",),
    "fast/graphs": ("fast/test_graphs.py",),
}


_ROOMS = {"compare": "judge/compare", "explain": "judge/explain", "oracle": "oracle", "recording": "formats/recording"}
"""Where the packages are that mutants are drawn from, and their tests."""
_DEFAULT = {
    "compare": ("test_run.py",),
    "oracle": ("test_golden.py",),
    "explain": ("test_run.py", "core/test_rerun.py"),
}
_OTHERS = {
    "compare/cache": ("test_cache_rows.py", "test_cache.py"),
    "compare/judged": ("test_judged.py", "test_divergence.py", "test_run.py"),
    "compare/local": ("test_local.py", "test_bounds.py", "test_conventions.py", "test_replay.py", "test_run.py"),
    "compare/replay": ("test_replay_rows.py", "test_replay.py"),
    "compare/row_judge": (
        "test_row_judge.py",
        "test_choices.py",
        "test_bounds.py",
        "test_conventions.py",
        "test_run.py",
    ),
    "compare/sequences": ("test_sequences.py", "test_slots.py"),
    "compare/systematic": ("test_effects.py", "test_systematic.py"),
    **{
        f"compare/conventions/{name}": (*(f"conventions/test_{test}.py" for test in tests), "test_conventions.py")
        for name, tests in (
            ("attention", ("attention", "quantised_cache")),
            ("linear", ("linear", "quantised")),
            ("rotary", ("rotary",)),
        )
    },
    **{
        f"explain/attention/{name}": (
            f"attention/test_{tests}.py",
            "attention/test_scores.py",
            "attention/test_history.py",
        )
        for name, tests in (("masks", "softmax"), ("softmax", "softmax"), ("reads", "reads"), ("slots", "table"))
    },
    "explain/attention/unrecorded": ("test_through.py",),
    "explain/core/formats": ("core/test_formats.py", "products/test_linear.py"),
    "explain/norms": ("test_norms.py",),
    "explain/experts/experts": ("experts/test_experts.py", "test_mixtures.py"),
    "explain/experts/mixture": (
        "experts/test_mixture.py",
        "experts/test_experts.py",
        "experts/test_experts_of_rows.py",
        "test_mixtures.py",
    ),
    "explain/trial/not_finite": (
        "trial/test_not_finite.py",
        "attention/test_history.py",
        "cache/test_entries.py",
        "products/test_linear.py",
    ),
    "explain/trial/ranking": ("trial/test_trial.py", "trial/test_ranking.py", "trial/test_guard.py"),
    "explain/run": ("test_run.py", "layer/test_not_run.py", "cache/test_entries.py"),
    "explain/core/wrong_operation": ("core/test_wrong_operation.py", "rotary/test_frequencies.py"),
    "explain/core/fit": ("core/test_fit.py",),
    "explain/core/rerun": ("core/test_rerun.py", "test_through.py"),
    "explain/cache/contents": (
        "cache/test_content_index.py",
        "cache/test_replay.py",
        "cache/test_entries.py",
        "attention/test_table.py",
    ),
    "explain/cache/entries": ("cache/test_entries.py", "cache/test_content.py"),
    "explain/cache/formats": ("cache/test_content.py",),
    "explain/states/recurrence": ("states/test_recurrence.py", "test_mixtures.py"),
    "explain/experts/router": ("experts/test_router.py", "experts/test_experts_of_rows.py", "test_mixtures.py"),
    "explain/products/linear": ("products/test_linear.py", "products/test_declared.py"),
    "explain/rotary/positions": ("rotary/test_positions.py",),
    "explain/rotary/rotation": ("rotary/test_frequencies.py", "rotary/test_rotation.py"),
    "oracle/caches": ("test_decode.py",),
    "oracle/golden": ("test_golden_files.py", "test_golden.py"),
    "oracle/graph": ("test_graph.py", "test_trace.py"),
    "oracle/make_golden": ("test_make_golden.py", "test_golden.py"),
    "oracle/model": ("test_model.py", "test_weights.py"),
    "oracle/parts": ("test_lockstep.py",),
    "oracle/rotation": ("test_rotation.py", "../judge/explain/rotary/test_frequencies.py"),
}


def files_of_tests(path: str, *, all_tests: bool) -> tuple[str, ...]:
    """Return the tests of a file that is mutated, both below the root of the checkout."""
    stem = path.removesuffix(".py")
    if stem.startswith("reference_engine/"):
        names = _ENGINE[stem.removeprefix("reference_engine/")]
        return tuple(f"tests/unit/reference_engine/{name}" for name in names)
    package, room = next(item for item in _ROOMS.items() if stem.startswith(f"harness/{item[1]}/"))
    inner = stem.removeprefix(f"harness/{room}/")
    folder, _, module = inner.rpartition("/")
    if package == "explain":
        module = inner
    elif folder:  # a package in a package is tested in one file
        module = folder
    if package == "recording":
        tests = _RECORDING_OWN.get(module, (f"recording/test_{module}.py",))
        files = (f"tests/unit/formats/{name}" for name in (*tests, *_RECORDING))
        return tuple(file for file in files if (ROOT / file).is_file())
    if all_tests:
        return (f"tests/unit/{room}",)
    tests = "/".join((*module.split("/")[:-1], f"test_{module.split('/')[-1]}.py"))
    has_own = (ROOT / "tests" / "unit" / room / tests).is_file()
    by_default = _OTHERS.get(f"{package}/{module}", (tests,) if has_own else _DEFAULT[package])
    return tuple(f"tests/unit/{room}/{name}" for name in _OTHERS.get(f"{package}/{inner}", by_default))


def subjects() -> list[str]:
    """Return the files that mutants are drawn from, below the root of the checkout."""
    paths = [path for room in _ROOMS.values() for path in sorted((ROOT / "harness" / room).rglob("*.py"))]
    modules = [str(path.relative_to(ROOT)) for path in paths if path.stem != "__init__"]
    return [*modules, *(f"reference_engine/{name}.py" for name in _ENGINE if name not in LISTED_ONLY)]


LISTED_ONLY = ("fast/graphs",)
"""Modules of the engine that only listed changes are made to."""
