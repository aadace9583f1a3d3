"""The functions: arguments become a plan, the plan is run as the command line runs it, the result is a report."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api.arguments import (
    Dtype,
    Model,
    Prompts,
    checkpoint,
    choose,
    dtype_name,
    engine_option_texts,
    model_or_own,
    named_as_arguments,
    requests_of,
)
from harness.api.reports import CheckReport, ProfileReport
from harness.base.files import scratch_folder
from harness.base.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.api.arguments import Chosen, Subject
    from harness.oracle.golden import Golden
    from harness.results.weights import WeightsResult


def check(
    engine: "Subject" = "reference",
    *,
    model: Model | None = None,
    prompts: Prompts | None = None,
    max_new_tokens: int | None = None,
    schedules: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
    dtype: Dtype = "auto",
    device: "str | torch.device | None" = None,
    truth: str = "auto",
    rows: int | None = None,
    rows_seed: int = 0,
    explain_seconds: float = 5.0,
    mtp: bool = False,
    lora: str | Path | None = None,
    engine_options: Mapping[str, object] | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> CheckReport:
    """Check an engine against HuggingFace, operation by operation and row by row.

    Args:
        engine: name of an installed engine; an engine (an object with `name`, `capabilities` and `run`); a model object
            of HF's, patched or not; or any `nn.Module` whose forward takes token ids and returns logits.
        model: checkpoint that gives the truth: a folder, an embedded one by its name (`qwen3-tiny`), a hub id, or a
            model object of HF's, whose weights are saved to a temporary folder. None: the embedded default; for a model
            object of HF's as engine its own weights in HF's own code.
        prompts: texts, or lists of token ids; None for those of the embedded default.
        max_new_tokens: tokens to generate for each prompt, 24 by default.
        schedules: `plain`, `chunked:5`, `batched`, ...; empty for the default ones that engine and prompts can follow.
        names: for a module whose parts have other names than HF's: paths in the module, and HF's paths of the parts.
            An entry holds for all that is in the part; `*` stands for the number of a layer. For an engine with steps:
            its tensors, as the report's sources name them, and the taps that they are for certain.
        dtype: float32, bfloat16, float16; `auto` for the module's or the checkpoint's own.
        device: where engine and oracle run; None for the module's own, or the CPU.
        truth: precision of the truth: `float64`, `float32`, or `auto` for what the dtype needs.
        rows: positions of each request at which products and attention are judged, for long prompts; None for all.
        rows_seed: draws other positions.
        explain_seconds: time for trying changes of HF's code as causes of what is wrong; 0 ends the check at the first
            wrong operation, without looking for its cause.
        mtp: whether to judge the layers that predict further tokens, too.
        lora: folder of an adapter (PEFT's format) that the truth applies beside the model's weights; an engine that is
            opened by its name gets it as its option `lora`.
        engine_options: of an engine that is opened by its name.
        out: folder, new or empty, for `report.html` and the engine's recordings; None keeps nothing.
        progress: called with the current stage, the finished part and the total.
        local_files_only: do not contact the model hub.

    Returns:
        What was found. Wrong numbers are a result, not an error: see `CheckReport.assert_ok`.

    Raises:
        HarnessError: an argument cannot be used, or the engine raised an exception.
    """
    from harness.judge.jobs.check import run_check
    from harness.judge.jobs.opened import keep_page
    from harness.plan import plan_request

    with _under_test(engine, model, dtype=dtype, device=device, options=engine_options, names=names) as chosen:
        plan = plan_request(
            **chosen.changes(),
            truth=truth,
            requests=requests_of(prompts),
            max_new_tokens=max_new_tokens,
            schedules=_several(schedules),
            rows=rows,
            rows_seed=rows_seed,
            explain_s=explain_seconds,
            mtp=mtp,
            lora=None if lora is None else Path(lora),
            local_files_only=local_files_only,
        )
        result = run_check(chosen.opened(plan), out=None if out is None else Path(out), progress=progress)
    if out is not None:
        keep_page(result, Path(out))
    return CheckReport.of(result)


def golden(
    model: Model | None = None,
    *,
    prompts: Prompts | None = None,
    max_new_tokens: int | None = None,
    dtype: Dtype = "auto",
    device: "str | torch.device | None" = None,
    truth: str = "auto",
    lora: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> "Golden":
    """Return what HuggingFace computes: every tap of the model in high precision, with a greedy continuation.

    Args:
        model: as for `check`.
        prompts: as for `check`.
        max_new_tokens: tokens to generate for each prompt, 24 by default.
        dtype: of the weights, and of the noise that is measured.
        device: where to run; None for the CPU.
        truth: `float64`, `float32`, or `auto` for what the dtype needs.
        lora: as for `check`.
        out: folder, new or empty, to write the golden to; None for the cache.
        progress: called with the current stage, the finished part and the total.
        local_files_only: do not contact the model hub.

    Raises:
        HarnessError: an argument cannot be used, or `out` cannot be written.
    """
    from harness.judge.jobs.opened import run_golden
    from harness.plan import plan_request

    with named_as_arguments(), checkpoint(model) as (folder, _label):
        plan = plan_request(
            model=folder,
            dtype=_chosen(dtype),
            device=None if device is None else str(device),
            truth=truth,
            requests=requests_of(prompts),
            max_new_tokens=max_new_tokens,
            lora=None if lora is None else Path(lora),
            local_files_only=local_files_only,
        )
        return run_golden(plan, out=None if out is None else Path(out), progress=progress)


def diff(
    expected: str | Path,
    actual: str | Path,
    *,
    model: Model | None = None,
    lora: str | Path | None = None,
    taps: Sequence[str] = ("*",),
    require: Sequence[str] = ("decode",),
    truth: str = "auto",
    device: "str | torch.device" = "cpu",
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> CheckReport:
    """Compare two recordings row by row.

    Args:
        expected: folder of a golden, or of another engine's recording.
        actual: folder of the recording under test.
        model: checkpoint, as `check` has it; with it every operation is judged by itself.
        lora: folder of the adapter (PEFT's format) that the engine applied.
        taps: `all`, `cache`, `logits`, `tokens`, or globs; the taps of `expected` that match must be in `actual`.
        require: what `actual` must have reached.
        truth: precision in which operations are judged.
        device: where they are replayed.
        progress: called with the current stage, the finished part and the total.
        local_files_only: do not contact the model hub.

    Raises:
        HarnessError: a recording is missing or damaged, they hold different prompts, or an argument makes no sense.
    """
    from harness.judge.jobs.diff import run_diff

    with named_as_arguments(), checkpoint(model) as (folder, _label):
        result = run_diff(
            Path(expected),
            Path(actual),
            model=folder,
            lora=None if lora is None else Path(lora),
            taps=_several(taps),
            require=_several(require),
            truth=truth,
            device=str(device),
            progress=progress,
            local_files_only=local_files_only,
        )
    return CheckReport.of(result)


def profile(
    engine: "Subject" = "reference",
    *,
    model: Model | None = None,
    prompt_tokens: int = 128,
    max_new_tokens: int = 32,
    batch_size: int = 1,
    phases: Sequence[str] = (),
    num_runs: int = 5,
    dtype: Dtype = "auto",
    device: "str | torch.device | None" = None,
    engine_options: Mapping[str, object] | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> ProfileReport:
    """Profile an engine, prefill and decode by themselves: times, operators, memory, roofline.

    Args:
        engine: as `check` has it; an engine needs steps (`open_session`), which a module of your own has not.
        model: as for `check`.
        prompt_tokens: tokens of each prompt; they are random.
        max_new_tokens: tokens to generate for each request.
        batch_size: requests that arrive together.
        phases: `prefill`, `decode`, `mixed`; empty for all that the engine has.
        num_runs: runs without a profiler, for the latencies.
        dtype: as for `check`.
        device: as for `check`.
        engine_options: of an engine that is opened by its name.
        out: folder, new or empty, for `report.html`, traces and memory snapshots; None keeps nothing.
        progress: called with the current stage, the finished part and the total.
        local_files_only: do not contact the model hub.

    Raises:
        HarnessError: an argument cannot be used, or the engine has no steps.
    """
    from harness.judge.jobs.opened import new_output_dir
    from harness.plan import plan_engine
    from harness.profiling.load import ProfileWorkload
    from harness.profiling.profile import ProfileSpec, keep_profile

    with _under_test(engine, model, dtype=dtype, device=device, options=engine_options, names=None) as chosen:
        workload = ProfileWorkload(
            batch_size=batch_size, num_prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens
        )
        plan = chosen.opened(plan_engine(**chosen.changes(), local_files_only=local_files_only))
        spec = ProfileSpec(plan=plan, workload=workload, phases=_several(phases), num_runs=num_runs)
        with scratch_folder("harness-") as passing:
            kept = passing if out is None else Path(out)
            with nullcontext() if out is None else new_output_dir(kept):
                return ProfileReport.of(keep_profile(spec, kept, progress=progress))


@contextmanager
def _under_test(
    engine: "Subject",
    model: Model | None,
    *,
    dtype: Dtype,
    device: "str | torch.device | None",
    options: Mapping[str, object] | None,
    names: Mapping[str, str] | None,
) -> "Iterator[Chosen]":
    """Yield the subject with its checkpoint; errors of the block name arguments."""
    with named_as_arguments(), checkpoint(model_or_own(engine, model)) as (folder, label):
        chosen = choose(engine, dtype=dtype, device=device, options=options or {}, names=names)
        yield replace(chosen, checkpoint=folder, label=label, options=engine_option_texts(options or {}))


def _chosen(dtype: Dtype) -> str | None:
    """Return a dtype's name; None for `auto`."""
    name = dtype_name(dtype)
    return None if name == "auto" else name


def _several(texts: Any) -> tuple[str, ...]:
    """Return texts as a tuple; a single text becomes one element."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def weights(
    first: "str | Path | nn.Module | Mapping[str, torch.Tensor] | object",
    second: "str | Path | nn.Module | Mapping[str, torch.Tensor] | object",
    *,
    before: "str | Path | nn.Module | Mapping[str, torch.Tensor] | None" = None,
    local_files_only: bool = True,
) -> "WeightsResult":
    """Compare two sets of weights, tensor by tensor: fused and sharded tensors are found by what they hold.

    Args:
        first: the reference weights: a checkpoint's folder, a module, tensors by name, or an engine in memory
            (the reference engine's `LLMEngine`, vLLM's `LLM`, a `Session` of any adapter).
        second: the weights under test.
        before: the first weights before an update: how much of it arrived in the second ones.
        local_files_only: do not contact the model hub.

    Raises:
        HarnessError: weights cannot be read.
    """
    from harness.judge.weights.compare import compare_weights

    with named_as_arguments():
        return compare_weights(first, second, before=before, local_files_only=local_files_only)
