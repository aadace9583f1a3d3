"""Is the map still right where the model is wrong? Checkpoints with a mistake, run by engines that are read by content.

    python -m tests.benchmarks.content_faults module|llamacpp|mlx|onnxruntime|openvino CHECKPOINT [--fault NAME]

The engine runs a checkpoint with one mistake, and is held to the one without. HF's own engine on the wrong checkpoint
says what each tap is there: a tap whose rows are other ones is a false match. Prints a line for each mistake that the
model can have: taps found of those that HF's engine shows, false matches, the operation that is wrong, the first
divergence.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import harness
from harness.base.metrics import rounding_unit
from harness.engines import open_engine
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import Work
from harness.engines.module.forward import ModuleStepper
from harness.extensions.faults.zoo.quiet import quiet
from tests.benchmarks.engines_by_content import llamacpp_by_content, rows_of

FALSE = 1e-2
"""Relative error of a row that is another value: engines differ by their roundings, and by what these have grown to."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A change of a parameter."""

    name: str
    parameter: str
    """How its name ends, after `layers.1.` where it is of a layer."""
    change: Callable[[torch.Tensor, Any], torch.Tensor]
    is_of_layer: bool = True

    def plant(self, model: Any) -> str | None:
        """Change a model, and return the module that is wrong; None if it has no such parameter."""
        for name, value in model.named_parameters():
            if name.endswith(self.parameter) and (".layers.1." in name) == self.is_of_layer:
                value.data = self.change(value.data, model).to(value).contiguous().clone()
                return str(name.rpartition(".")[0])
        return None


def head_size(model: Any) -> int:
    """Return the elements of a head."""
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def stale(weight: torch.Tensor, _model: Any) -> torch.Tensor:
    """Return other weights of the same size."""
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight) * weight.std()


def interleaved(weight: torch.Tensor, model: Any) -> torch.Tensor:
    """Return the rows of heads with the two halves of each rotary pair side by side."""
    return weight.unflatten(0, (-1, 2, head_size(model) // 2)).transpose(1, 2).reshape(weight.shape)


def heads_rolled(weight: torch.Tensor, model: Any) -> torch.Tensor:
    """Return the rows of the head before."""
    return weight.roll(head_size(model), 0)


def of_another_layer(parameter: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """Return what takes the parameter of another layer of the same shape; where there is none, its own reversed."""

    def change(weight: torch.Tensor, model: Any) -> torch.Tensor:
        others = [
            item for name, item in model.named_parameters() if name.endswith(parameter) and ".layers.1." not in name
        ]
        return next((item.data for item in others if item.shape == weight.shape), weight.flip(0))

    return change


MISTAKES = (
    Mistake("norm's weight plus one", ".input_layernorm.weight", lambda w, _: w + 1),
    Mistake(
        "norm of another layer",
        ".post_attention_layernorm.weight",
        of_another_layer(".post_attention_layernorm.weight"),
    ),
    Mistake("final norm without its weight", "model.norm.weight", lambda w, _: w * 0 + 0.5, is_of_layer=False),
    Mistake("norm of keys reversed", ".k_norm.weight", lambda w, _: w.flip(0) * 1.3),
    Mistake("heads of queries rolled", ".q_proj.weight", heads_rolled),
    Mistake("rotary pairs of queries interleaved", ".q_proj.weight", interleaved),
    Mistake("rotary pairs of keys interleaved", ".k_proj.weight", interleaved),
    Mistake("heads of keys rolled", ".k_proj.weight", heads_rolled),
    Mistake("heads of values rolled", ".v_proj.weight", heads_rolled),
    Mistake("values half as large again", ".v_proj.weight", lambda w, _: w * 1.5),
    Mistake("bias of queries left out", ".q_proj.bias", lambda w, _: w * 0),
    Mistake("heads of the context rolled", ".o_proj.weight", lambda w, model: w.roll(head_size(model), 1)),
    Mistake("output half as large again", ".o_proj.weight", lambda w, _: w * 1.5),
    Mistake("gate is of another layer", ".mlp.gate_proj.weight", of_another_layer(".mlp.gate_proj.weight")),
    Mistake("up negated", ".mlp.up_proj.weight", lambda w, _: -w),
    Mistake("rows of down rolled", ".mlp.down_proj.weight", lambda w, _: w.roll(1, 0)),
    Mistake("stale weights of down", ".mlp.down_proj.weight", stale),
    Mistake("embedding three times as large", ".embed_tokens.weight", lambda w, _: w * 3, is_of_layer=False),
    Mistake("columns of the head rolled", "lm_head.weight", lambda w, _: w.roll(3, 1), is_of_layer=False),
    Mistake("order of experts rolled", ".experts.down_proj", lambda w, _: w.roll(1, 0)),
    Mistake(
        "experts' gate and up exchanged", ".experts.gate_up_proj", lambda w, _: torch.cat([*reversed(w.chunk(2, 1))], 1)
    ),
    Mistake("rows of the router rolled", ".mlp.gate.weight", lambda w, _: w.roll(1, 0)),
    Mistake("rows of the latent's product rolled", ".kv_b_proj.weight", lambda w, _: w.roll(16, 0)),
    Mistake("rows of the queries' product rolled", ".q_b_proj.weight", lambda w, _: w.roll(16, 0)),
    Mistake("decay of the recurrence", ".linear_attn.A_log", lambda w, _: w + 1),
    Mistake("convolution reversed", ".linear_attn.conv1d.weight", lambda w, _: w.flip(2)),
    Mistake("bias of the time step left out", ".linear_attn.dt_bias", lambda w, _: w * 0),
    Mistake("rows of the recurrence's output rolled", ".linear_attn.out_proj.weight", lambda w, _: w.roll(1, 0)),
)


def theta(config: Any) -> str:
    """Take another base of the rotation."""
    for parameter in (config.rope_parameters, *config.rope_parameters.values()):
        if isinstance(parameter, dict) and "rope_theta" in parameter:
            parameter["rope_theta"] *= 30
    return "q_rope"


def eps(config: Any) -> str:
    """Take another eps in all norms."""
    config.rms_norm_eps = 1e-2
    return "input_layernorm"


def activation(config: Any) -> str:
    """Take another activation."""
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    setattr(config, name, "gelu" if getattr(config, name) == "silu" else "silu")
    return "act"


SETTINGS = {"another theta": theta, "another eps": eps, "another activation": activation}


def planted(folder: Path, name: str, out: Path) -> str | None:
    """Write a checkpoint with a mistake, and return the operation that is wrong; None if the model cannot have it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    if name in SETTINGS:
        wrong = SETTINGS[name](model.config)
    else:
        mistake = None if name == "none" else next(mistake for mistake in MISTAKES if mistake.name == name).plant(model)
        if mistake is None and name != "none":
            return None
        wrong = mistake or "none"
    model.save_pretrained(out)
    for path in folder.glob("tokenizer*"):
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    rope = config.get("rope_parameters") or {}  # mlx-lm and the exporters read the keys of before transformers 5
    config["rope_theta"] = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta", 1e4)
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    (out / "config.json").write_text(json.dumps(config))
    return wrong


def export(engine: str, folder: Path, out: Path) -> Path:
    """Return the folder of an export for an engine's runtime."""
    command = {
        "onnxruntime": [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu",
                        "-i", folder, "-o", out],
        "openvino": ["optimum-cli", "export", "openvino", "--model", folder, "--task", "text-generation-with-past",
                     "--weight-format", "fp32", "--disable-convert-tokenizer", out],
    }[engine]  # fmt: skip
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return out


class Nameless:
    """A model in a list, where nothing finds its modules: their sites are classes and numbers of calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take a model of transformers."""
        self.held = [ModuleStepper(model, torch.device("cpu"))]

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`."""
        return self.held[0].step(work)


def opened(engine: str, wrong: Path, right: Path, scratch: Path) -> Any:
    """Open an engine on the wrong checkpoint; its truth is the right one."""
    if engine == "module":
        model = AutoModelForCausalLM.from_pretrained(wrong, dtype=torch.float32, local_files_only=True).eval()
        return StepEngine(lambda: Nameless(model), name=engine, folder=right, dtype="float32")
    if engine == "llamacpp":
        return llamacpp_by_content(wrong, right)
    options = {} if engine == "mlx" else {"export": str(export(engine, wrong, scratch))}
    made = open_engine(engine, wrong, dtype="float32", device="cpu", options=options)
    made._folder = right  # type: ignore[attr-defined]
    return made


def hf_rows(wrong: Path, right: Path) -> dict[tuple[str, int, int], torch.Tensor]:
    """Return what HF's own engine computes with the wrong checkpoint, by tap, request and position."""
    return rows_of(open_engine("hf", wrong, dtype="float32", device="cpu", options={}), right, "float32")[0]


def false_taps(live: dict[Any, torch.Tensor], known: dict[Any, torch.Tensor]) -> list[str]:
    """Return the taps of which a row is another value than HF's."""
    limit = max(FALSE, 100 * rounding_unit(torch.float32))
    return sorted({
        key[0]
        for key in live.keys() & known.keys()
        if float((live[key].double() - known[key].double()).norm()) > limit * float(known[key].double().norm())
    })  # fmt: skip


def line(engine: str, right: Path, name: str) -> str | None:
    """Return a line of the table; None if the model cannot have the mistake."""
    with tempfile.TemporaryDirectory() as scratch, quiet():
        wrong = Path(scratch) / "wrong"
        where = planted(right, name, wrong)
        if where is None:
            return None
        known = hf_rows(wrong, right)
        made = opened(engine, wrong, right, Path(scratch) / "export")
        live, report = rows_of(made, right, "float32")
    shown, there = {tap for tap, *_ in live}, {tap for tap, *_ in known if not tap.endswith(("_cache", ".topk"))}
    first = report.runs[0].first_divergence
    said = "pass" if first is None else first.tap
    false = ", ".join(false_taps(live, known)) or "0"
    return f"| {name} | {len(shown & there)} of {len(there)} | {false} | {where} | {said} |"


def lines(engine: str, folder: Path, fault: str | None) -> Iterator[str]:
    """Yield the lines of the table."""
    settings = [name for name in SETTINGS if name != "another activation" or engine == "module"]  # others read none
    for name in [fault] if fault else ["none", *(mistake.name for mistake in MISTAKES), *settings]:
        try:
            shown = line(engine, folder, name)
        except (harness.HarnessError, subprocess.CalledProcessError, ValueError) as error:
            shown = f"| {name} | {' '.join(str(error).split())[:200]} | | | |"
        if shown is not None:
            yield shown


def main() -> None:
    """Print the table of an engine and a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("module", "llamacpp", "mlx", "onnxruntime", "openvino"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--fault")
    options = parser.parse_args()
    print("| mistake | taps found | false | wrong is | first divergence |\n|---|---:|---|---|---|", flush=True)
    for item in lines(options.engine, options.checkpoint, options.fault):
        print(item, flush=True)


if __name__ == "__main__":
    main()
