"""What may be served, by name: weights, an adapter, a cache, and parameters of the sampler, with `+` between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf import checkpoint_of_gguf
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.extensions.quant.files import NAMES, Importance, importance_of, make_file
from harness.extensions.quant.forward import sample_text
from harness.extensions.quant.hf_types import HF_TYPES, hf_type_models
from harness.extensions.rollout.forward import rounded
from harness.extensions.server.chat.conversations import Conversation, Renderer
from harness.extensions.server.names import TokenNames
from harness.extensions.server.sampler.draws import Draws
from harness.extensions.server.truth import Rounding
from harness.formats.checkpoint import Checkpoint, HFTokenizer, cache_dir, resolve
from harness.formats.taps import Kind
from harness.oracle.lora import add_adapter
from harness.oracle.model import HFModel, load_model
from harness.oracle.sampling import SamplingSettings
from harness.plan import Plan

_DTYPES = {
    "float32": "float32", "fp32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "f16": "float16",
}  # fmt: skip
_TYPES = {item.lower(): item for item in NAMES} | {"q4": "Q4_0", "q8": "Q8_0", "int8": "Q8_0"}
_BY_PACKAGE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the package gguf makes; llama.cpp's quantiser makes the others."""
_FP8 = "fp8"
_CACHES = {
    "fp8": partial(rounded, dtype=torch.float8_e4m3fn),
    "fp8_cut": partial(rounded, dtype=torch.float8_e4m3fn, truncates=True),  # as vLLM's kernels for CPUs write it
    "fp8_e5m2": partial(rounded, dtype=torch.float8_e5m2),
    "fp16": partial(rounded, dtype=torch.float16),
    "bf16": partial(rounded, dtype=torch.bfloat16),
}
_EXPECTED = (
    "bf16,fp8,q4, a type of `harness quant`, or a folder; "
    "and +lora=FOLDER, +kv=fp8, +template=FILE, +temperature=0.7, ..."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedHypothesis:
    """One thing that may be served."""

    name: str
    """As it was given."""
    weights: str
    """A dtype, `fp8`, a type that `harness quant` makes, or a checkpoint."""
    lora: Path | None
    cache: Rounding | None
    """What becomes of keys and values before attention reads them; None: nothing."""
    template: Path | None
    """What renders a chat; None: the checkpoint's own template."""
    settings: SamplingSettings
    """What the tokens are drawn with."""


def parse_settings(parts: Sequence[str], settings: SamplingSettings, *, where: str) -> SamplingSettings:
    """Return settings with some of them changed, each given as NAME=VALUE.

    Raises:
        HarnessError: BAD_OPTION.
    """
    fields = SamplingSettings.__dataclass_fields__
    known = [name for name, field in fields.items() if isinstance(field.default, int | float)]
    for part in parts:
        name, _, value = part.partition("=")
        try:
            number = int(value) if name == "top_k" else float(value)
        except ValueError:
            number = None
        if name not in known or number is None or number < 0:
            expected = f"NAME=VALUE, with a name of {', '.join(known)}"
            what = "this is no parameter of a sampler"
            raise HarnessError(Code.BAD_OPTION, what, where=where, expected=expected, actual=part)
        settings = replace(settings, **{name: number})  # type: ignore[arg-type]
    return settings


def parse_hypotheses(names: Sequence[str], asked: SamplingSettings) -> tuple[ServedHypothesis, ...]:
    """Return what the names stand for.

    Of the names there are at least two; `asked` are the sampler's parameters where a name says nothing.

    Raises:
        HarnessError: BAD_OPTION.
    """
    where = "--hypotheses"
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        what = "at least two different hypotheses are needed"
        raise HarnessError(Code.BAD_OPTION, what, where=where, expected=_EXPECTED, actual=",".join(names))
    hypotheses = []
    for name in names:
        weights, *parts = name.split("+")
        pairs = [(key, value) for key, _, value in (part.partition("=") for part in parts)]
        models = {key: value for key, value in pairs if key in ("lora", "kv", "template")}
        others = [part for part in parts if part.partition("=")[0] not in models]
        settings = parse_settings(others, asked, where=where)
        if models.get("kv", "fp8") not in _CACHES:
            what = "this is no cache that can be supposed"
            raise HarnessError(Code.BAD_OPTION, what, where=where, expected=", ".join(_CACHES), actual=models["kv"])
        cache = _CACHES.get(models.get("kv", ""))
        lora, template = (Path(models[key]) if key in models else None for key in ("lora", "template"))
        hypotheses.append(
            ServedHypothesis(name=name, weights=weights, lora=lora, cache=cache, template=template, settings=settings)
        )
    return tuple(hypotheses)


def load_hypothesis(hypothesis: ServedHypothesis, plan: Plan, scratch: Path, *, vocab_size: int | None) -> HFModel:
    """Load a hypothesis's model.

    `vocab_size` is the vocabulary that it must have; None: any.

    Raises:
        HarnessError: as `make_file`, `load_model` and `add_adapter`; BAD_OPTION: another vocabulary, or no cache.
    """
    hf = _weights(hypothesis.weights, plan, scratch)
    if hypothesis.lora is not None:
        add_adapter(hf, hypothesis.lora)
    if vocab_size not in (None, hf.vocab_size):
        what = "a hypothesis has another vocabulary than the first"
        where = f"--hypotheses {hypothesis.name}"
        raise HarnessError(Code.BAD_OPTION, what, where=where, expected=f"{vocab_size} tokens", actual=hf.vocab_size)
    if hypothesis.cache is not None and not any(operation.kind is Kind.CACHE for operation in hf.graph.operations):
        what = "the model caches no keys and values"
        raise HarnessError(Code.BAD_OPTION, what, where=f"--hypotheses {hypothesis.name}", actual=hf.config.model_type)
    return hf


def _weights(name: str, plan: Plan, scratch: Path) -> HFModel:
    lower, source, device = name.lower(), plan.checkpoint, plan.case.device
    dtype = getattr(torch, _DTYPES.get(lower, plan.case.dtype))
    if lower in _DTYPES or lower == _FP8:
        hf = load_model(source, dtype=dtype, device=device, stays=True)
        return _round_to_fp8(hf) if lower == _FP8 else hf
    kind = _TYPES.get(lower)
    if kind is not None and kind in HF_TYPES:
        exact = hf_type_models(kind, load_model(source, dtype=torch.float32), scratch)[1]
        return HFModel(model=exact.model.to(device, dtype), checkpoint=source, dtype=dtype, device=torch.device(device))
    source = Checkpoint(resolve(name) if kind is None else _of_type(kind, source, scratch))
    return load_model(source, dtype=dtype, device=device, stays=True)


def _of_type(kind: str, source: Checkpoint, scratch: Path) -> Path:
    """Return the folder of a checkpoint with the weights of a type of GGUF."""

    def importance() -> Importance:
        return importance_of(hf, sample_text(hf, num_sequences=8, num_tokens=256, seed=1))

    if kind in _BY_PACKAGE:
        path = write_gguf(source.folder, scratch / f"{kind}.gguf", kind)
    else:
        hf = load_model(source, dtype=torch.float32)
        path = make_file(hf, kind, scratch, importance)
    return checkpoint_of_gguf(path, cache_dir() / "gguf")


@torch.no_grad()
def _round_to_fp8(hf: HFModel) -> HFModel:
    """Round the weights of the layers to float8 (e4m3) with a scale for each output, as servers do at loading."""
    head = hf.model.get_output_embeddings()
    others = {id(part.weight) for part in (head, hf.model.get_input_embeddings()) if part is not None}
    kept = {
        id(parameter) for part in hf.model.modules() if isinstance(part, nn.Conv1d) for parameter in part.parameters()
    }
    largest = torch.finfo(torch.float8_e4m3fn).max
    for weight in hf.model.parameters():
        if weight.ndim > 1 and id(weight) not in others | kept:
            scale = weight.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
            weight.copy_((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale)
    return hf


def renderer_of(checkpoint: Checkpoint, template: Path | None) -> Renderer:
    """Return what renders chats by a file of jinja2, or by the checkpoint's own template.

    Raises:
        HarnessError: as `HFTokenizer.load` and `Renderer`; BAD_OPTION: the file cannot be read.
    """
    tokenizer = HFTokenizer.load(checkpoint.folder)
    if template is not None:
        try:
            tokenizer.hf.chat_template = read_text(template)
        except (OSError, UnicodeDecodeError) as error:
            what, expected = f"the chat template cannot be read: {error}", "a file of jinja2"
            raise HarnessError(Code.BAD_OPTION, what, where=template, expected=expected) from None
    return Renderer(tokenizer)


def render_draws(draws: Draws, renderer: Renderer, names: TokenNames) -> Draws:
    """Return the same draws in the same order, each after the tokens that its chat is rendered to.

    Raises:
        HarnessError: BAD_TEMPLATE: the template refuses a chat.
    """
    prompts: dict[int, tuple[int, ...]] = {}
    rendered_draws = {}
    for request, draw in draws.values():
        if request.number not in prompts:
            (message,) = request.messages(names)
            rendering = renderer.render(Conversation(messages=(message,)))
            if rendering is None:
                what = f"the chat template refuses a chat: {renderer.refusal}"
                raise HarnessError(Code.BAD_TEMPLATE, what, where="--hypotheses", actual=message["content"])
            prompts[request.number] = rendering.token_ids
        prompt = prompts[request.number]
        after = replace(draw, past=replace(draw.past, prompt=prompt))
        rendered_draws[request.number, len(prompt) + draw.step - 1] = (replace(request, prompt=prompt), after)
    return rendered_draws
