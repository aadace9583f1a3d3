"""Images of a request: the tensors that HF's processor makes of them, and what HF's model hands to its text decoder.

A request says no more of its images than the digest of a safetensors file (`RequestInfo.inputs`); a copy of the file is
in the harness's cache, where every process finds it. HF's own code places the images among the tokens and gives every
token its positions, of one axis or several. An engine that feeds a prompt in pieces cuts what comes of that.

`T` tokens, `A` axes of positions, `D` hidden size, `B` requests, `C` columns.
"""

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import cache_dir
from harness.formats.recording import RequestInfo
from harness.oracle.untraced import UntracedModel, all_parts_held, hf_failures

_PER_TOKEN = "token_type_ids"
"""End of the names of inputs that have a number for each token: `mm_token_type_ids`."""
_POSITIONS, _DEEPSTACK = "position_ids", "deepstack_visual_embeds"
_HINT = "save all that the checkpoint's processor returns but input_ids and attention_mask, for this one request"


def keep_inputs(file: Path) -> str:
    """Keep a copy of a safetensors file in the cache, and return its digest.

    Raises:
        HarnessError: BAD_INPUTS: it cannot be read.
    """
    try:
        data = file.read_bytes()
        safetensors.torch.load(data)
    except (OSError, SafetensorError) as error:
        raise HarnessError(Code.BAD_INPUTS, f"the inputs cannot be read: {error}", where=file, hint=_HINT) from error
    return keep_bytes(data).stem


def keep_bytes(data: bytes) -> Path:
    """Put the bytes of a safetensors file into the cache, and return the file there, which is named by its digest."""
    place = _place(hashlib.sha256(data).hexdigest())
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f"{place.stem}.{os.getpid()}")
        new.write_bytes(data)
        new.replace(place)
    return place


def inputs_of(hf: UntracedModel, request: RequestInfo, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return what HF's forward takes beside so many tokens of a request; those after its prompt are text.

    Raises:
        HarnessError: BAD_INPUTS: the file is not in the cache.
    """
    kept = {} if request.inputs is None else _kept(str(_place(request.inputs)), request.inputs)
    inputs = {}
    for name, tensor in kept.items():
        if name.endswith(_PER_TOKEN):
            tensor = torch.nn.functional.pad(tensor, (0, max(0, num_tokens - tensor.shape[1])))[:, :num_tokens]
        inputs[name] = tensor.to(hf.device)
    return inputs


def check_inputs(hf: UntracedModel, request: RequestInfo) -> None:
    """Refuse images that the model does not take, or that are not those of the request's tokens.

    Raises:
        HarnessError: BAD_INPUTS.
    """
    if request.inputs is None:
        return
    where, names = f"request {request.id}", set(_kept(str(_place(request.inputs)), request.inputs))
    taken = set(inspect.signature(hf.model.forward).parameters) - {"input_ids", "attention_mask", _POSITIONS}
    needed = {name for name in taken if name == f"mm_{_PER_TOKEN}"}
    if hf.decoder_path is None or not needed <= names <= taken:
        raise HarnessError(
            Code.BAD_INPUTS,
            "the model does not take these inputs",
            where=where,
            expected=", ".join(sorted(needed)) if needed - names else "names of arguments of HF's forward",
            actual=", ".join(sorted(names)),
            hint=_HINT,
        )
    try:
        decoder_inputs(hf, request)
    except HarnessError as error:
        if error.code is not Code.HF_FAILED:
            raise
        raise HarnessError(Code.BAD_INPUTS, error.what, where=where, hint=_HINT) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInputs:
    """What HF's model hands to its text decoder for one request."""

    by_token: Mapping[str, torch.Tensor]
    """[T, ...] by the name of the argument, `inputs_embeds` among them."""
    positions: torch.Tensor | None
    """[A, T] int64; None where the decoder counts the tokens itself."""
    deepstack: Sequence[torch.Tensor]
    """[T, D] each, zero beside the images: added after the first layers (Qwen3-VL)."""
    types: Mapping[str, torch.Tensor]
    """[T] by the name of the argument: a number for each token, not 0 where it is a part of an image."""
    is_seen_whole: bool
    """Whether attention goes both ways inside of an image: then no step may end there."""


class _CapturedError(BaseException):
    """Ends a forward before its decoder; a BaseException, so that no handler of the model's code catches it."""


@torch.no_grad()
def decoder_inputs(hf: UntracedModel, request: RequestInfo) -> DecoderInputs:
    """Run HF's model over the tokens of a request as far as its text decoder."""
    arguments: dict[str, Any] = {}

    def capture(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        arguments.update(kwargs)
        raise _CapturedError

    ids = torch.tensor([request.token_ids], device=hf.device)
    options = inputs_of(hf, request, ids.shape[1])
    capturing = _decoder(hf).register_forward_pre_hook(capture, with_kwargs=True)
    with capturing, suppress(_CapturedError), all_parts_held(hf), hf_failures(hf.folder):
        hf.model(input_ids=ids, use_cache=False, **options)
    by_token = {name: x[0] for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.shape[:2] == ids.shape}
    positions = arguments.get(_POSITIONS)
    is_of_axes = isinstance(positions, torch.Tensor) and positions.dim() == 3
    return DecoderInputs(
        by_token=by_token,
        positions=positions[:, 0] if is_of_axes and positions is not None else None,
        deepstack=[_spread(rows, arguments["visual_pos_masks"][0]) for rows in arguments.get(_DEEPSTACK) or ()],
        types={name: types[0] for name, types in options.items() if name.endswith(_PER_TOKEN)},
        is_seen_whole=_looks_ahead(arguments.get("attention_mask")),
    )


def _looks_ahead(masks: Any) -> bool:
    """Whether a mask [1, 1, T, T], bool or additive, or one of several by type of layer, shows a token a later one."""
    if isinstance(masks, Mapping):
        return any(map(_looks_ahead, masks.values()))
    if not isinstance(masks, torch.Tensor) or masks.dim() != 4:
        return False
    seen = masks if masks.dtype == torch.bool else masks > torch.finfo(masks.dtype).min / 2
    return bool(seen[0, 0].triu(1).any())


def _spread(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put rows to the tokens where the mask [T] holds: [T, D]."""
    table = rows.new_zeros(len(mask), rows.shape[1])
    table[mask] = rows
    return table


Cell = tuple[DecoderInputs | None, int]
"""One row of a forward: what is handed for its request, and its position; None for text alone."""


@contextmanager
def handing(hf: UntracedModel, cells: Sequence[Sequence[Cell]]) -> Iterator[None]:
    """Hand rows of requests with images to the text decoder, [B, C], in place of its usual inputs."""

    def put(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        rows = [(*place, inputs, at) for place, (inputs, at) in _numbered(cells) if inputs is not None]
        for name in dict.fromkeys(name for *_, inputs, _ in rows for name in inputs.by_token):
            kwargs[name] = _filled(kwargs.get(name), cells, name, rows)
        if any(inputs.positions is not None for *_, inputs, _ in rows):
            kwargs[_POSITIONS] = _positions(kwargs[_POSITIONS], rows)
        depth = max(len(inputs.deepstack) for *_, inputs, _ in rows)
        kwargs |= {_DEEPSTACK: _deepstack(rows, depth)} if depth else {}
        return args, kwargs

    if all(inputs is None for line in cells for inputs, _ in line):
        yield
        return
    with _decoder(hf).register_forward_pre_hook(put, with_kwargs=True, prepend=True):
        yield


_Row = tuple[int, int, DecoderInputs, int]
"""Lane, column, and what is handed there."""


def _numbered(cells: Sequence[Sequence[Cell]]) -> Iterator[tuple[tuple[int, int], Cell]]:
    return (((lane, at), cell) for lane, line in enumerate(cells) for at, cell in enumerate(line))


def _filled(text_rows: Any, cells: Sequence[Sequence[Cell]], name: str, rows: Sequence[_Row]) -> torch.Tensor:
    like = next(inputs.by_token[name] for *_, inputs, _ in rows)
    table: torch.Tensor = (
        like.new_zeros(len(cells), len(cells[0]), *like.shape[1:]) if text_rows is None else text_rows.clone()
    )
    for lane, column, inputs, at in rows:
        table[lane, column] = inputs.by_token[name][at]
    return table


def _positions(text_positions: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Return positions [A, B, C] that replace the engine's positions [B, C], which are right for text."""
    num_axes = next(len(inputs.positions) for *_, inputs, _ in rows if inputs.positions is not None)
    table = text_positions.expand(num_axes, *text_positions.shape[-2:]).clone()
    for lane, column, inputs, at in rows:
        if inputs.positions is not None:
            table[:, lane, column] = inputs.positions[:, at]
    return table


def _deepstack(rows: Sequence[_Row], depth: int) -> list[torch.Tensor]:
    """Return the rows of images alone, as the decoder takes them: in their order in the forward."""
    image_rows = [(inputs, at) for *_, inputs, at in rows if bool(inputs.by_token["visual_pos_masks"][at])]
    like = next(inputs.deepstack[0] for *_, inputs, _ in rows if inputs.deepstack)
    return [
        torch.stack([inputs.deepstack[level][at] for inputs, at in image_rows]) if image_rows else like[:0]
        for level in range(depth)
    ]


def _decoder(hf: UntracedModel) -> torch.nn.Module:
    assert hf.decoder_path is not None, "checked by check_inputs"
    return hf.module(hf.decoder_path)


def _place(digest: str) -> Path:
    return cache_dir() / "inputs" / f"{digest}.safetensors"


@lru_cache(maxsize=8)
def _kept(place: str, digest: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a file in the cache, which is the one of the digest."""
    try:
        data = Path(place).read_bytes()
    except OSError as error:
        hint = "run harness check with the case once: it keeps a copy"
        raise HarnessError(Code.BAD_INPUTS, f"there is no copy: {error}", where=place, hint=hint) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise HarnessError(Code.BAD_INPUTS, "the copy was changed", where=place, hint="remove it")
    tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    return tensors
