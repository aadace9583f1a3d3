"""Mistakes of loaders of quantised checkpoints, planted in the file that the engine reads: what the check says of each.

    DTYPE=bfloat16 python -m tests.quantised_faults [NAME ...]
    ENGINE=reference python -m tests.quantised_faults
    python -m tests.quantised_faults --sound

Each fault changes the tensors of one module in a copy of a checkpoint; the engine is HF with the weights of that copy
(or the reference engine with its own products), and the truth is that of the checkpoint as it was. Nothing here uses
the judge's own table of mistakes.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.errors import Code
from tests.quantised_checkpoints import GROUP, KINDS, Tensors, write_quantised

CHECKPOINTS = Path(__file__).parents[1] / "cases" / "checkpoints"
PROMPT = [1, 5, 9, 33, 77, 120, 4, 8, 9, 3, 200, 31, 7, 7, 8, 1, 90, 100]
UP, Q, V = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
GATE = "model.layers.1.mlp.gate_proj"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Fault:
    """A mistake, and what its name must contain."""

    name: str
    kind: str
    module: str
    change: Callable[[Tensors, str], None]
    named: str
    is_native: bool = False
    """Whether HF runs the quantised checkpoint itself, with its arithmetic."""
    model: str = "llama-tiny"


def _set(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], None]:
    def apply(tensors: Tensors, module: str) -> None:
        old = tensors[module + suffix]
        dtype = torch.float32 if old.dtype in (torch.bfloat16, torch.float16) else old.dtype  # a square keeps its bits
        tensors[module + suffix] = change(old).to(dtype).reshape(old.shape).contiguous()

    return apply


def _from(source: str, *suffixes: str) -> Callable[[Tensors, str], None]:
    def apply(tensors: Tensors, module: str) -> None:
        for suffix in suffixes:
            tensors[module + suffix] = tensors[source + suffix].clone()

    return apply


def _rolled(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _like(x, x.view(torch.uint8) if x.itemsize == 1 else x, dim)


def _like(x: torch.Tensor, bits: torch.Tensor, dim: int) -> torch.Tensor:
    return bits.roll(-1, dim).view(x.dtype)


def _each_code(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change the eight codes of each word."""

    def apply(words: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([(words.long() >> (4 * at)) & 15 for at in range(8)], dim=-1)
        whole = sum(code << (4 * at) for at, code in enumerate(change(codes).long().unbind(-1)))
        return torch.where(whole >= 1 << 31, whole - (1 << 32), whole)

    return apply


def _halves(x: torch.Tensor) -> torch.Tensor:
    return (x >> 4) | ((x & 15) << 4)


_SWAP_PAIRS = _each_code(lambda codes: codes[..., [1, 0, 3, 2, 5, 4, 7, 6]])
_TO_AWQ = _each_code(lambda codes: codes[..., list(torch.tensor(_AWQ_ORDER).argsort())])
_FROM_AWQ = _each_code(lambda codes: codes[..., list(_AWQ_ORDER)])
_PLUS_ONE = _each_code(lambda codes: (codes + 1).clamp(max=15))
_MINUS_ONE = _each_code(lambda codes: (codes - 1).clamp(min=0))


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.float().square()


def _faults() -> Iterator[Fault]:
    for kind, native in (("w8a8", False), ("w8a8", True), ("fp8-dynamic", True)):
        name = f"{kind}{', inputs quantised' if native else ''}"
        yield Fault(
            f"{name}: scales of the next output",
            kind,
            UP,
            _set(".weight_scale", _rolled(0)),
            "scale of the next",
            native,
        )
        yield Fault(
            f"{name}: scales not applied", kind, Q, _set(".weight_scale", torch.ones_like), "not applied", native
        )
        yield Fault(f"{name}: scales of gate", kind, UP, _from(GATE, ".weight_scale"), f"those of {GATE}", native)
        yield Fault(f"{name}: scales twice", kind, UP, _set(".weight_scale", _square), "applied twice", native)
    yield Fault("fp8-static: scale twice", "fp8-static", UP, _set(".weight_scale", _square), "twice", True)
    for kind, suffix in (("deepseek", ".weight_scale_inv"), ("fp8-blocks", ".weight_scale")):
        yield Fault(f"{kind}: next block of inputs", kind, UP, _set(suffix, _rolled(1)), "scale of the next")
        yield Fault(f"{kind}: next block of outputs", kind, UP, _set(suffix, _rolled(0)), "scale of the next")
        yield Fault(f"{kind}: transposed", kind, UP, _set(suffix, lambda x: x.T), "transposed")
        yield Fault(f"{kind}: twice", kind, Q, _set(suffix, _square), "twice")
    w4 = ".weight_packed"
    yield Fault("w4a16: next group", "w4a16", UP, _set(".weight_scale", _rolled(1)), "scale of the next")
    yield Fault("w4a16: transposed", "w4a16", UP, _set(".weight_scale", lambda x: x.T), "transposed")
    yield Fault("w4a16: halves of bytes", "w4a16", UP, _set(w4, _SWAP_PAIRS), "of a byte exchanged")
    yield Fault("w4a16: AWQ's order", "w4a16", V, _set(w4, _TO_AWQ), "AWQ's order")
    yield Fault("w4a16: two's complement", "w4a16", UP, _set(w4, _each_code(lambda c: c ^ 8)), "two's complement")
    yield Fault("w4a16: scales of gate", "w4a16", UP, _from(GATE, ".weight_scale"), f"those of {GATE}")
    yield Fault("w4a16: not applied", "w4a16", V, _set(".weight_scale", torch.ones_like), "not applied")
    zero = ".weight_zero_point"
    yield Fault(
        "w4a16-asymmetric: next zero point", "w4a16-asymmetric", UP, _set(zero, _rolled(1)), "zero point of the next"
    )
    yield Fault("w4a16-asymmetric: zero point + 1", "w4a16-asymmetric", V, _set(zero, _PLUS_ONE), "one too large")
    ignored = _set(".weight_g_idx", lambda x: torch.arange(len(x)) // GROUP)
    yield Fault("w4a16-ordered: order ignored", "w4a16-ordered", UP, ignored, "order of the inputs")
    whole = ".weight_global_scale"
    yield Fault("nvfp4: no global scale", "nvfp4", UP, _set(whole, torch.ones_like), "global scale is not applied")
    yield Fault("nvfp4: global scale multiplied", "nvfp4", UP, _set(whole, lambda x: 1 / x), "multiplied by the global")
    yield Fault("nvfp4: global scale of gate", "nvfp4", UP, _from(GATE, whole), "global scale is that of")
    yield Fault("nvfp4: next block", "nvfp4", V, _set(".weight_scale", _rolled(1)), "scale of the next")
    yield Fault("nvfp4: halves of bytes", "nvfp4", Q, _set(w4, _halves), "byte exchanged")
    yield Fault("mxfp4: next block", "mxfp4", UP, _set(".weight_scale", _rolled(1)), "scale of the next")
    yield Fault("mxfp4: halves of bytes", "mxfp4", V, _set(w4, _halves), "byte exchanged")
    for kind in ("gptq", "gptq-v2", "gptq-ordered"):
        yield Fault(f"{kind}: zero point + 1", kind, UP, _set(".qzeros", _PLUS_ONE), "one too large")
        yield Fault(f"{kind}: zero point - 1", kind, V, _set(".qzeros", _MINUS_ONE), "one too small")
        yield Fault(f"{kind}: next group", kind, UP, _set(".scales", _rolled(0)), "scale of the next")
    order = _set(".g_idx", lambda x: torch.arange(len(x)) // GROUP)
    yield Fault("gptq-ordered: order ignored", "gptq-ordered", UP, order, "order of the inputs")
    yield Fault("awq: lowest bits first", "awq", UP, _set(".qweight", _FROM_AWQ), "lowest bits first")
    yield Fault("awq: next group", "awq", UP, _set(".scales", _rolled(0)), "scale of the next")
    yield Fault("awq: zero point + 1", "awq", V, _set(".qzeros", _PLUS_ONE), "one too large")
    absmax = ".weight.absmax"
    yield Fault(
        "nf4: next block", "nf4", UP, _set(absmax, lambda x: x.roll(-1)), "scale of the next", model="qwen2-tiny"
    )
    yield Fault("nf4: halves of bytes", "nf4", V, _set(".weight", _halves), "lowest bits first", model="qwen2-tiny")
    yield Fault("bnb-int8: scales of gate", "bnb-int8", UP, _from(GATE, ".SCB"), f"those of {GATE}")
    yield Fault("torchao: next output", "torchao", UP, _set("._weight_scale", _rolled(0)), "scale of the next")
    for kind in ("w8a8", "w4a16", "awq"):
        yield Fault(f"{kind}: head quantised", kind, "lm_head", _head(kind), "leaves it as it is", model="qwen2-tiny")


def _head(kind: str) -> Callable[[Tensors, str], None]:
    def apply(tensors: Tensors, module: str) -> None:
        weight = tensors[module + ".weight"]
        if kind == "w8a8":
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[module + ".weight"] = (weight / scale).round() * scale
            return
        groups = weight.unflatten(1, (-1, GROUP))
        if kind == "w4a16":
            scale = groups.abs().amax(dim=2, keepdim=True) / 7
            tensors[module + ".weight"] = ((groups / scale).round() * scale).flatten(1)
            return
        low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        tensors[module + ".weight"] = ((((groups / scale).round() + zero).clamp(0, 15) - zero) * scale).flatten(1)

    return apply


FAULTS = {fault.name: fault for fault in _faults()}


def engine_of(folder: Path, right: Path, dtype: torch.dtype, *, is_native: bool) -> Any:
    """Return HF on a quantised checkpoint: with its own arithmetic, or with dequantised weights.

    Args:
        folder: the checkpoint that it reads.
        right: the one that says what is right.
        dtype: of the activations.
        is_native: whether transformers loads the checkpoint itself.
    """
    from harness.engines.hf import HFEngine, load_quantised
    from harness.formats.checkpoint import Checkpoint, resolve
    from harness.oracle.model import HFModel, load_model

    if is_native:
        model = load_quantised(folder, dtype=dtype)
    else:
        model = load_model(resolve(str(folder)), dtype=dtype, stays=True).model
    checkpoint = Checkpoint(resolve(str(right)))
    return HFEngine(HFModel(model=model, checkpoint=checkpoint, dtype=dtype, device=torch.device("cpu")), None)


OF_THE_REFERENCE = ("w8a8", "fp8-dynamic", "fp8-static", "deepseek", "fp8-blocks")
"""Formats that the reference engine multiplies with."""


def check_fault(fault: Fault, scratch: Path, dtype: str = "float32", engine: str = "hf") -> Any:
    """Return what the check says of an engine with a fault: `hf`, or `reference` with its own products."""
    import harness
    from harness.engines.reference import open_engine

    original = CHECKPOINTS / fault.model
    write_quantised(original, scratch / "right", fault.kind)
    write_quantised(
        original, scratch / "wrong", fault.kind, changed=lambda tensors: fault.change(tensors, fault.module)
    )
    if engine == "reference":
        subject: Any = open_engine(scratch / "wrong", dtype=dtype, device="cpu", options={"weights": "checkpoint"})
    else:
        subject = engine_of(scratch / "wrong", scratch / "right", getattr(torch, dtype), is_native=fault.is_native)
    return harness.check(
        subject, model=scratch / "right", prompts=[PROMPT], max_new_tokens=4, schedules=["plain"], dtype=dtype
    )


@dataclass(frozen=True)
class Score:
    """What the check said of one fault."""

    detected: bool
    localised: bool
    cause: str
    others: str
    """Findings elsewhere."""
    named: str
    """`yes`, `no` or `wrongly`."""


def score(fault: Fault, report: Any) -> Score:
    """Hold a report against what was planted."""
    # A token that differs follows from the product; it is no place where anything is wrong.
    findings = [
        finding for finding in report.runs[0].findings if finding.tap and finding.code is not Code.TOKENS_DIFFER
    ]
    taps = {finding.tap for finding in findings}
    head = {"lm_head": {"lm_head", "logits"}}.get(fault.module, {fault.module})
    at_fault = next((finding for finding in findings if finding.tap in head), None)
    explanation = at_fault.explanation if at_fault is not None else None
    cause = explanation.cause if explanation is not None and explanation.is_cause else ""
    named = "no" if not cause else "yes" if fault.named and fault.named in cause else "wrongly"
    others = "; ".join(f"{finding.code} {finding.message}" for finding in findings if finding.tap not in head)
    return Score(bool(findings), bool(taps) and taps <= head, cause, others, named)


def sound(kind: str, scratch: Path, dtype: str, engine: str) -> Any:
    """Return what the check says of an engine without a fault: `reference`, `dequantised` or `native`."""
    import harness

    model = "qwen2-tiny" if kind.startswith("nf4") else "llama-tiny"
    write_quantised(CHECKPOINTS / model, scratch / "right", kind)
    subject: Any = "reference"
    if engine != "reference":
        right = scratch / "right"
        subject = engine_of(right, right, getattr(torch, dtype), is_native=engine == "native")
    return harness.check(
        subject, model=scratch / "right", prompts=[PROMPT], max_new_tokens=4, schedules=["plain"], dtype=dtype
    )


def main_sound() -> None:
    """Print a line for each format, dtype and engine without a fault."""
    for kind in KINDS:
        for engine in ("reference", "dequantised", "native") if kind != "gpt-oss" else ():
            for dtype in ("float32", "bfloat16"):
                with tempfile.TemporaryDirectory() as scratch:
                    os.environ["HARNESS_CACHE"] = f"{scratch}/cache"
                    try:
                        report = sound(kind, Path(scratch), dtype, engine)
                        findings = list(report.runs[0].findings)
                        conventions = sorted({tap.convention for tap in report.runs[0].taps if tap.convention})
                        said = (
                            f"{report.outcome} | {'; '.join(conventions)} | {findings[0].message if findings else ''}"
                        )
                    except Exception as error:  # of transformers, or of the format's package
                        said = f"refused | | {type(error).__name__}: {' '.join(str(error).split())[:120]}"
                print(f"| {kind} | {engine} | {dtype} | {said} |", flush=True)


def main(names: list[str]) -> None:
    """Print a line for each fault, and how many of each kind there were."""
    scores = []
    dtype, engine = os.environ.get("DTYPE", "float32"), os.environ.get("ENGINE", "hf")
    for name, fault in FAULTS.items():
        # Its products of W8A8 have one form: what HF does in two is one fault.
        is_served = engine == "hf" or (
            fault.kind in OF_THE_REFERENCE
            and fault.module != "lm_head"
            and (fault.kind, fault.is_native) != ("w8a8", True)
        )
        if not is_served or (names and not any(item in name for item in names)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["HARNESS_CACHE"] = f"{scratch}/cache"
            result = score(fault, check_fault(fault, Path(scratch), dtype, engine))
        scores.append(result)
        print(
            f"| {name} | {result.detected} | {result.localised} | {result.named} | {result.cause} | {result.others} |",
            flush=True,
        )
    print(f"{len(scores)} faults: {sum(item.detected for item in scores)} detected, "
          f"{sum(item.localised for item in scores)} localised, {sum(item.named == 'yes' for item in scores)} named, "
          f"{sum(item.named == 'wrongly' for item in scores)} named wrongly")  # fmt: skip


if __name__ == "__main__":
    main_sound() if sys.argv[1:] == ["--sound"] else main(sys.argv[1:])
