"""Ways to read a quantised weight wrongly: the reader of its format with one deviation, in one table.

The checkpoint is at hand, so what a loader's mistake makes of a weight can be computed: its codes, scales and zero
points are read as the format says, one of them is changed, and the product with that weight is held against the
engine's.

`O` outputs, `I` inputs, `R` rows of blocks, `C` columns of blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from harness.extensions.quantised.codes import Codes
from harness.extensions.quantised.config import InputScheme, Scheme
from harness.extensions.quantised.conventions import quantised_checkpoint, quantised_weight
from harness.extensions.quantised.inputs import ways_to_round
from harness.judge.compare.conventions.linear import product
from harness.judge.explain.core.formats import float8, int8, name_of
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

Misreadings = Iterator[tuple[str, Codes]]
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_INPUTS = (
    InputScheme(dtype="int8", share="token"),
    InputScheme(dtype="float8_e4m3fn", share="token"),
    InputScheme(dtype="float8_e4m3fn", share="group", group=128),
)
_FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fnuz)


def _other_blocks(codes: Codes) -> Misreadings:
    """Scales, or scales and zero points, that lie beside the right ones."""
    for dim, what in ((-1, "inputs"), (-2, "outputs")):
        for shift, which in ((-1, "next"), (1, "one before")):
            if codes.scale.shape[dim] > 1:
                cause = f"each block of {what} has the scale of the {which}"
                yield cause, replace(codes, scale=codes.scale.roll(shift, dim))
                if codes.zero is not None and codes.zero.any() and codes.zero.shape == codes.scale.shape:
                    zero = codes.zero.roll(shift, dim)
                    yield f"each block of {what} has the zero point of the {which}", replace(codes, zero=zero)
                    both = replace(codes, scale=codes.scale.roll(shift, dim), zero=zero)
                    yield f"each block of {what} has the scale and the zero point of the {which}", both


def _other_in_memory(codes: Codes) -> Misreadings:
    """Scales of the blocks beside the right ones in the file, also of another row."""
    if min(codes.scale.shape[-2:]) > 1:
        for shift, which in ((-1, "next"), (1, "one before")):
            scale = codes.scale.flatten().roll(shift).reshape(codes.scale.shape)
            yield f"each block has the scale of the {which} in the file", replace(codes, scale=scale)


def _turned(codes: Codes) -> Misreadings:
    """Scales whose rows and columns are exchanged."""
    rows, columns = codes.scale.shape[-2:]
    if rows > 1 and columns > 1:
        turned = codes.scale.transpose(-1, -2)
        cause = "the scales are transposed"
        yield cause, replace(codes, scale=turned.reshape(codes.scale.shape))
        if codes.zero is not None and codes.zero.shape == codes.scale.shape:
            zero = codes.zero.transpose(-1, -2).reshape(codes.zero.shape)
            both = replace(codes, scale=turned.reshape(codes.scale.shape), zero=zero)
            yield "the scales and the zero points are transposed", both


def _scaled_otherwise(codes: Codes) -> Misreadings:
    """Scales that are left out, or used twice, or as their inverse."""
    yield "the scales are not applied", replace(codes, scale=torch.ones_like(codes.scale), divisor=None)
    used = codes.scale if codes.divisor is None else codes.scale / codes.divisor
    yield "the scales are applied twice", replace(codes, scale=used.square(), divisor=None)
    yield "the weight is divided by the scales", replace(codes, scale=1 / used, divisor=None)
    if codes.divisor is not None:
        yield "the global scale is not applied", replace(codes, divisor=None)
        yield "the weight is multiplied by the global scale", replace(codes, divisor=1 / codes.divisor)
        yield "the scales of blocks are not applied", replace(codes, scale=torch.ones_like(codes.scale))
    for dtype in (torch.bfloat16, torch.float16):
        rounded = codes.scale.to(dtype).to(torch.float32)
        if not torch.equal(rounded, codes.scale) and bool(rounded.isfinite().all()):
            yield f"the scales are rounded to {name_of(dtype)}", replace(codes, scale=rounded)


def _zero_points(codes: Codes) -> Misreadings:
    if codes.zero is None:
        return
    yield "the zero points are one too large", replace(codes, zero=codes.zero + 1)
    yield "the zero points are one too small", replace(codes, zero=codes.zero - 1)
    if bool(codes.zero.any()):
        yield "the zero points are not subtracted", replace(codes, zero=None)
        half = torch.full_like(codes.zero, codes.words.half if codes.words is not None else 8.0)
        yield "the middle of the codes is taken for the zero points", replace(codes, zero=half)


def _order_of_inputs(codes: Codes) -> Misreadings:
    if codes.group is not None:
        yield "the order of the inputs (g_idx) is ignored", replace(codes, group=None)


def _order_in_words(codes: Codes) -> Misreadings:
    """Codes that are taken out of their words in another order."""
    words = codes.words
    if words is None:
        return
    count = len(words.order)
    plain = tuple(range(count))
    swapped = tuple(at ^ 1 for at in range(count))
    others = {"lowest bits first": plain, "with the two of a byte exchanged": swapped}
    others |= {"highest bits first": plain[::-1]} if count > 2 else {}
    others |= {"in AWQ's order": _AWQ} if count == len(_AWQ) else {}
    for name, order in others.items():
        if order == words.order or codes.values.shape[words.dim - 2] % count:
            continue
        changed = replace(codes, values=_reordered(codes.values, words.dim - 2, words.order, order))
        cause = f"the codes of a word are read {name}"
        yield cause, changed
        if codes.zero is not None and codes.zero.shape[-2] % count == 0:
            zero = _reordered(codes.zero, -2, words.order, order)
            yield f"{cause}, and those of the zero points", replace(changed, zero=zero)
            yield f"the zero points of a word are read {name}", replace(codes, zero=zero)


def _reordered(x: torch.Tensor, dim: int, order: tuple[int, ...], new_order: tuple[int, ...]) -> torch.Tensor:
    parts = x.transpose(dim, -1).unflatten(-1, (-1, len(order)))
    changed = torch.empty_like(parts)
    changed[..., list(new_order)] = parts[..., list(order)]
    return changed.flatten(-2).transpose(dim, -1)


def _other_codes(codes: Codes) -> Misreadings:
    """Codes that stand for other values."""
    values = codes.values
    is_whole = bool((values == values.round()).all())
    if is_whole and codes.words is not None and codes.zero is None:
        half = codes.words.half
        yield f"the codes are read without their offset of {half:g}", replace(codes, values=values + half)
        yield (
            "the codes are read as two's complement",
            replace(codes, values=torch.where(values < 0, values + half, values - half)),
        )
    if is_whole and codes.words is None and bool((values < 0).any()):
        yield (
            "the codes are read without their sign",
            replace(codes, values=torch.where(values < 0, values + 256, values)),
        )
    bits = values.to(torch.float8_e4m3fn)
    if codes.words is None and torch.equal(bits.to(torch.float32), values) and not is_whole:
        for dtype in _FLOAT8:
            yield f"the codes are read as {name_of(dtype)}", replace(codes, values=bits.view(dtype).to(torch.float32))


MISREADINGS: tuple[Callable[[Codes], Misreadings], ...] = (
    _other_blocks, _other_in_memory, _turned, _scaled_otherwise, _zero_points, _order_of_inputs, _order_in_words,
    _other_codes,
)  # fmt: skip
"""What each yields is a cause, and what the weight becomes by it."""


def misread_weight(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The weight was read from the quantised checkpoint with one mistake.

    Causes: of a quantised checkpoint: scales or zero points of the next block, of the one before, of a module that is
    fused with it; transposed, not applied, applied twice, rounded; the global scale left out, multiplied; zero points
    one too large or small, not subtracted; the order of the inputs (`g_idx`) ignored; codes of a word in another order,
    without their offset or sign, as another float8.
    """
    weight, checkpoint = quantised_weight(wrong.hf, wrong.operation.module), quantised_checkpoint(wrong.hf)
    if weight is None or checkpoint is None or wrong.weight(wrong.operation.tap) is None:  # or too large to be held
        return
    codes = checkpoint.codes(weight.name)
    right = codes.dequantised()
    named = [pair for misread in MISREADINGS for pair in misread(codes)]
    for cause, changed in (*named, *_of_siblings(wrong, checkpoint, codes)):
        misread = changed.dequantised()
        if misread.shape == right.shape and bool(misread.isfinite().all()) and not torch.equal(misread, right):
            yield _hypothesis(wrong, cause, misread)


def _hypothesis(wrong: WrongOperation, cause: str, weight: torch.Tensor) -> Hypothesis:
    bias = wrong.weight(wrong.operation.tap, "bias")
    output = product(wrong.inputs[0].flatten(1), weight.to(torch.float64), bias)
    return Hypothesis(cause=cause, output=output)


def _of_siblings(wrong: WrongOperation, checkpoint: QuantisedCheckpoint, codes: Codes) -> Misreadings:
    """Scales of a module that is fused with this one: of q, k and v, or of gate and up."""
    for operation in wrong.siblings():
        weight = checkpoint.weights.get(f"{operation.module}.weight")
        if weight is None:
            continue
        theirs = checkpoint.codes(weight.name)
        if theirs.scale.shape == codes.scale.shape and theirs.block == codes.block:
            yield f"the scales are those of {operation.tap}", replace(codes, scale=theirs.scale)
            if theirs.divisor is not None:
                scales = replace(codes, scale=theirs.scale, divisor=theirs.divisor)
                yield f"the scales and the global scale are those of {operation.tap}", scales
        if theirs.divisor is not None and codes.divisor is not None:
            yield f"the global scale is that of {operation.tap}", replace(codes, divisor=theirs.divisor)


def inputs_otherwise(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The inputs are quantised to *form*, and the checkpoint says otherwise."""
    weight = quantised_weight(wrong.hf, wrong.operation.module)
    matrix = wrong.weight(wrong.operation.tap)
    if weight is None or matrix is None:
        return
    declared, x = weight.scheme.inputs, wrong.inputs[0].flatten(1)
    bias = wrong.weight(wrong.operation.tap, "bias")
    says = "leaves them as they are" if declared is None else f"says {declared}"
    for scheme in _INPUTS:
        if scheme == declared or x.shape[1] % (scheme.group or 1):
            continue
        for way in ways_to_round(scheme, None, wrong.dtype):
            output = product(way.rounded(x.to(torch.float32)), matrix, bias)
            yield Hypothesis(cause=f"the inputs are quantised to {scheme}, and the checkpoint {says}", output=output)


def quantised_though_left_out(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The layer was quantised to *form*, and the checkpoint leaves it as it is."""
    checkpoint = quantised_checkpoint(wrong.hf)
    weight = wrong.weight(wrong.operation.tap)
    if checkpoint is None or weight is None or quantised_weight(wrong.hf, wrong.operation.module) is not None:
        return
    for scheme in checkpoint.schemes.all:
        for name, rounded in _roundings(weight, scheme).items():
            cause = f"the layer was quantised to {name}, and the checkpoint leaves it as it is"
            yield _hypothesis(wrong, cause, rounded)


def _roundings(weight: torch.Tensor, scheme: Scheme) -> Mapping[str, torch.Tensor]:
    """Return a weight rounded as a scheme rounds it, in the ways in which quantisers choose scales."""
    size = scheme.group if scheme.group and scheme.group > 0 else weight.shape[1]
    if weight.shape[1] % size:
        return {}
    groups = weight.unflatten(1, (-1, size))
    if "float8" in scheme.format or "fp8" in scheme.format:
        dims = {"tensor": None, "channel": (1,)}.get(scheme.strategy, (1,))
        return {"float8_e4m3fn": float8(weight, torch.float8_e4m3fn, dims)}
    if scheme.bits == 8:
        return {"int8": int8(groups, (2,)).flatten(1)}
    largest = groups.abs().amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    roundings = {}
    for top in (7, 7.5, 8):
        scale = largest / top
        roundings[f"int4, the largest of a group at {top}"] = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    low, high = groups.amin(dim=2, keepdim=True).clamp(max=0), groups.amax(dim=2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    roundings["int4 with zero points"] = (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).flatten(1)
    return roundings
