"""Goldens: what HF says every row of a set of requests should be, on disk, found again by content.

A golden is a recording of the float64 forward (`recording-format.md`) with one file more, `noise.safetensors`: for
every tap and row the relative L2 error that HF itself makes in the engine's dtype. One golden serves every schedule.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import transformers

import harness
from harness.checkpoint import cache_dir, config_hash, weights_hash
from harness.errors import Code, HarnessError
from harness.metrics import row_metrics
from harness.oracle.capture import capturing
from harness.oracle.decoder import Decoder
from harness.oracle.self_check import check_graph
from harness.oracle.truth import truth_forward
from harness.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo
from harness.taps import LOGITS

ORACLE_VERSION = 1
"""Part of a cached golden's name: raise it with every change of the oracle that moves its numbers."""

NOISE_FILE = "noise.safetensors"
LOGIT_NOISE = "lm_head.max_abs"
"""Entry of the noise file: the largest absolute error of HF's logits per sampled row, which decides ties."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to make a golden for."""

    token_ids: tuple[int, ...]
    max_new_tokens: int


class Golden:
    """A golden on disk: the truth and the noise of HF in the engine's dtype.

    Raises:
        HarnessError: DAMAGED_SAFETENSORS: its noise cannot be read, or is no noise.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.noise = _read_noise(recording)
        """Relative L2 error per row of every tap, float64 [rows], in the order of the steps; empty where unknown."""

    @property
    def requests(self) -> Sequence[RequestInfo]:
        """The requests with the tokens to be fed: prompt and continuation without its last token."""
        return self.recording.manifest.requests


def _read_noise(recording: Recording) -> dict[str, torch.Tensor]:
    path = recording.path / NOISE_FILE
    try:
        noise: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    except FileNotFoundError:
        return {}
    except (safetensors.SafetensorError, OSError) as error:
        raise _damaged(path, f"the golden's noise cannot be read: {error}") from error
    rows = _num_rows(recording)
    for tap, values in noise.items():
        expected = rows.get(LOGITS if tap == LOGIT_NOISE else tap)
        if values.shape != (expected,):
            raise _damaged(path, f"noise of {tap} has shape {list(values.shape)}", expected=[expected])
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise _damaged(path, f"noise of {tap} is not finite, or negative", expected="errors of 0 and more")
    return noise


def _num_rows(recording: Recording) -> dict[str, int]:
    """Count the rows of every tap over all steps."""
    counts: dict[str, int] = {}
    for step in recording.steps:
        for tap in step.tap_names:
            covered = step.rows_of(tap)
            counts[tap] = counts.get(tap, 0) + (step.entry.num_rows if covered is None else len(covered))
    return counts


def _damaged(path: Path, what: str, *, expected: object = None) -> HarnessError:
    return HarnessError(
        Code.DAMAGED_SAFETENSORS,
        what,
        where=path,
        expected=expected,
        hint="delete the folder and make the golden again",
    )


def golden_key(decoder: Decoder, prompts: Sequence[Prompt]) -> str:
    """Return the name under which a golden is cached: a digest of all that its numbers depend on."""
    content = {
        "harness": harness.__version__,
        "oracle": ORACLE_VERSION,
        "weights": weights_hash(decoder.folder),
        "config": config_hash(decoder.folder),
        "prompts": [asdict(prompt) for prompt in prompts],
        "dtype": str(decoder.dtype),
        "record_dtype": str(record_dtype(decoder.dtype)),
        "device": decoder.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def record_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the truth is kept: far finer than the engine's, no wider than it need be."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def cached_golden(decoder: Decoder, prompts: Sequence[Prompt], *, progress: Progress | None = None) -> Golden:
    """Return the golden of `prompts` from the cache, made first if it is not there or cannot be read."""
    folder = cache_dir() / "goldens" / golden_key(decoder, prompts)
    if folder.exists():
        try:
            golden = open_golden(folder)
            if golden.noise:
                return golden
        except HarnessError:
            pass  # damaged
        _discard(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return make_golden(decoder, prompts, folder, progress=progress)
    except OSError as error:
        raise HarnessError(
            Code.CANNOT_WRITE, f"the golden cannot be cached: {error}", where=folder, hint="set HARNESS_CACHE"
        ) from error
    except HarnessError as error:
        if error.code is Code.OUTPUT_EXISTS:  # another process was faster: its golden is the same
            return open_golden(folder)
        raise


def _discard(folder: Path) -> None:
    """Take a damaged golden away, by a rename first: another process may be reading what is put in its place."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".damaged-") as aside:
        folder.rename(Path(aside) / "golden")


def open_golden(folder: Path) -> Golden:
    """Open a golden; raises HarnessError as `Recording.open` and `Golden` do."""
    return Golden(Recording.open(folder))


def make_golden(decoder: Decoder, prompts: Sequence[Prompt], out: Path, *, progress: Progress | None = None) -> Golden:
    """Run the oracle over `prompts` and write the golden to the folder `out`, which must be new or empty.

    Raises:
        HarnessError: a prompt is empty, too long, or holds a token outside the vocabulary; `out` cannot be written.
    """
    report = progress or (lambda _label, _done, _total: None)
    for index, prompt in enumerate(prompts):
        check_prompt(decoder, prompt, index)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".making-") as making:
            folder = Path(making) / "golden"
            _make(decoder, prompts, folder, report)
            folder.rename(out)  # replaces an empty folder, and no other
    except OSError as error:
        exists = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        code = Code.OUTPUT_EXISTS if exists else Code.CANNOT_WRITE
        raise HarnessError(code, f"the golden cannot be put in its place: {error}", where=out) from error
    report("golden", len(prompts), len(prompts))
    return open_golden(out)


def _make(decoder: Decoder, prompts: Sequence[Prompt], folder: Path, report: Progress) -> None:
    requests = []
    for index, prompt in enumerate(prompts):
        report("continuation", index, len(prompts))
        fed = (*prompt.token_ids, *greedy_continuation(decoder, prompt)[:-1])
        requests.append(RequestInfo(id=index, token_ids=list(fed), prompt_length=len(prompt.token_ids)))
    with _truth_writer(decoder, requests, folder) as writer:
        for index, request in enumerate(requests):
            report("truth", index, len(requests))
            _record_truth(decoder, request, writer)
    recording = Recording.open(folder, verify=False)
    check_graph(decoder, recording)
    noise: list[dict[str, torch.Tensor]] = []
    for index, request in enumerate(requests):
        report("noise", index, len(requests))
        noise.append(_measure_noise(decoder, request, recording))
    _save_noise({tap: torch.cat([part[tap] for part in noise]) for tap in noise[0]} if noise else {}, folder)


def check_prompt(decoder: Decoder, prompt: Prompt, index: int) -> None:
    """Refuse a prompt that the model cannot serve."""
    where = f"request {index}"
    if not prompt.token_ids:
        raise HarnessError(Code.EMPTY_PROMPT, "the prompt has no token", where=where, hint="give at least one token")
    if prompt.max_new_tokens < 1:
        raise HarnessError(
            Code.BAD_OPTION, "max_new_tokens must be at least 1", where=where, actual=prompt.max_new_tokens
        )
    outside = [token for token in prompt.token_ids if not 0 <= token < decoder.vocab_size]
    if outside:
        raise HarnessError(
            Code.TOKEN_OUTSIDE_VOCABULARY,
            f"token id {outside[0]} is outside the vocabulary",
            where=f"{where}, position {prompt.token_ids.index(outside[0])}",
            expected=f"0 to {decoder.vocab_size - 1}",
            actual=outside[0],
        )
    length = len(prompt.token_ids) + prompt.max_new_tokens
    if length > decoder.max_positions:
        raise HarnessError(
            Code.PROMPT_TOO_LONG,
            "prompt and continuation are longer than the model allows",
            where=where,
            expected=f"at most {decoder.max_positions} positions",
            actual=f"{len(prompt.token_ids)} prompt tokens + {prompt.max_new_tokens} new = {length}",
            hint="shorten the prompt or lower --max-new-tokens",
        )


@torch.no_grad()
def greedy_continuation(decoder: Decoder, prompt: Prompt) -> list[int]:
    """Return `max_new_tokens` greedy tokens of HF in the engine's dtype; an end-of-text token does not end it."""
    from transformers import DynamicCache

    cache = DynamicCache(config=decoder.config)
    feed, tokens = list(prompt.token_ids), list[int]()
    for _ in range(prompt.max_new_tokens):
        ids = torch.tensor([feed], device=decoder.device)
        logits = decoder.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        feed = [int(logits[0, -1].argmax())]
        tokens += feed
    return tokens


def sampled_positions(request: RequestInfo) -> range:
    """Return the positions whose logits choose a token: the last of the prompt, and every one after it."""
    return range(request.prompt_length - 1, len(request.token_ids))


def _truth_writer(decoder: Decoder, requests: Sequence[RequestInfo], out: Path) -> RecordingWriter:
    return RecordingWriter(
        out,
        producer=Producer(name="harness.oracle", version=harness.__version__),
        model=ModelInfo(
            id=str(decoder.folder),
            revision=None,
            config_hash=config_hash(decoder.folder),
            weights_hash=weights_hash(decoder.folder),
        ),
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=decoder.device.type,
        environment=environment(),
        requests=requests,
        schedule="oracle",
        expected_taps=len(decoder.graph),
    )


def environment() -> dict[str, str | int]:
    """Return what the numbers of a run depend on besides its inputs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "cores": os.cpu_count() or 0,
    }


def _record_truth(decoder: Decoder, request: RequestInfo, writer: RecordingWriter) -> None:
    positions, sampled = range(len(request.token_ids)), sampled_positions(request)
    keep = record_dtype(decoder.dtype)
    writer.begin_step(
        phase="prefill",
        request=[request.id] * len(positions),
        position=positions,
        sampled_rows=sampled,
        partial_rows={LOGITS: sampled},
    )
    choices: list[int] = []

    def record(tap: str, tensor: torch.Tensor) -> None:
        if tap == LOGITS:
            choices.extend(tensor.argmax(dim=-1).tolist())
        writer.tap(tap, tensor.to(keep))

    truth_forward(decoder, request.token_ids, record, logit_rows=sampled)
    writer.end_step(choices)


@torch.no_grad()
def _measure_noise(decoder: Decoder, request: RequestInfo, truth: Recording) -> dict[str, torch.Tensor]:
    """Run HF in its own dtype over the request; return each tap's relative L2 error per row."""
    step = truth.steps[request.id]
    noise: dict[str, torch.Tensor] = {}

    def measure(tap: str, actual: torch.Tensor) -> None:
        expected = step.tap(tap).to(actual.device)
        metrics = row_metrics(actual, expected.view_as(actual))
        noise[tap] = metrics.relative_l2.cpu()
        if tap == LOGITS:
            noise[LOGIT_NOISE] = metrics.max_abs.cpu()

    ids = torch.tensor([request.token_ids], device=decoder.device)
    with capturing(decoder, measure):
        decoder.model(input_ids=ids, use_cache=False, logits_to_keep=len(sampled_positions(request)))
    return noise


def _save_noise(noise: dict[str, torch.Tensor], out: Path) -> None:
    try:
        safetensors.torch.save_file(noise, out / NOISE_FILE)
    except (OSError, safetensors.SafetensorError) as error:
        raise HarnessError(Code.CANNOT_WRITE, f"the golden's noise cannot be written: {error}", where=out) from error
