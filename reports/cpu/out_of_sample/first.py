"""Bugs that are in no catalogue, under drawn settings: how often a cause is said, and how often a wrong one.

    python reports/cpu/out_of_sample/first.py [--seed 0] [--draws 1] [--only NAME ...] [--out FILE]
    python reports/cpu/out_of_sample/second.py ...    # other bugs, the same options

Each bug is drawn a dtype, a checkpoint and a schedule. With it stands what may truly be said of it; for some there is
nothing, and every cause that is asserted is then a wrong one. Nothing here was used to write an explanation before it
was first run; what was fixed afterwards is said in the report.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tabulate import tabulate
from torch.nn.functional import silu

import reference_engine.attention.paged
import reference_engine.kv_cache
import reference_engine.model
from harness.base.environment import describe_machine
from harness.errors import HarnessError
from harness.extensions.faults.attention import attend, causal
from harness.extensions.faults.cache import stored
from harness.extensions.faults.fault import Category, Fault, FaultConfig
from harness.extensions.faults.injection import replacing
from harness.extensions.faults.norm import branches, edited_layers, norm_scaled_by
from harness.extensions.faults.position import frequencies_changed, positions_changed, rotary
from harness.extensions.faults.run import score_fault
from harness.extensions.faults.run import try_fault
from harness.extensions.faults.weights import loaded
from reference_engine.layers import MLP, Embedding, RMSNorm
from reference_engine.model import Attention

DTYPES = ("float32", "bfloat16", "float16")
MODELS = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
SCHEDULES = ("plain", "batched", "chunked:7", "mixed:8", "prefix-hit", "preempted", "forked")
NOTHING = r"(?!)"
"""What may be said of a bug that has no name: no cause at all."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One bug and what may be said of it."""

    inject: Any
    truth: str
    """Pattern of every cause that would be true."""
    models: tuple[str, ...] = MODELS


def attention(change: Callable[..., torch.Tensor]) -> Any:
    """Compute attention of every row by `change`, of query [T, N, H], K and V [C, K, H] and a mask [T, C]."""

    def chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
        return change(q, k, v, causal(len(q), len(k), window))

    def single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        rows = []
        for at in range(len(q)):
            seen = torch.ones(k.shape[1], dtype=torch.bool) if visible is None else visible[at].flatten()
            rows.append(change(q[at : at + 1], k[at][seen], v[at][seen], torch.ones(1, int(seen.sum())).bool()))
        return torch.cat(rows)

    file = reference_engine.attention.paged
    return replacing((file, "attend_chunk", lambda _: chunk), (file, "attend_single", lambda _: single))


def mlp(act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    def make(_: Any) -> Any:
        def call(self: MLP, x: torch.Tensor, batch: Any, prefix: str) -> torch.Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            inner = act(gate, up)
            out = self.down_proj(inner)
            for name, value in (("gate_proj", gate), ("up_proj", up), ("act", inner), ("down_proj", out)):
                batch.tap(prefix, f"mlp.{name}", value)
            return out

        return call

    return replacing((MLP, "__call__", make))


def weight(ending: str, change: Callable[[torch.Tensor], torch.Tensor], layer: int = 1) -> Any:
    def changed(weights: dict[str, torch.Tensor], _config: Any) -> None:
        for name in [name for name in weights if name.startswith(f"model.layers.{layer}.") and name.endswith(ending)]:
            weights[name] = change(weights[name]).contiguous()

    return loaded(changed)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def keys_unrotated() -> Any:
    """The query is turned, and the key is not: the query is turned first."""

    def make(original: Any) -> Any:
        calls = [0]

        def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return original(x, cos, sin) if calls[0] % 2 else x

        return turn

    return replacing((reference_engine.model, "apply_rotary", make))


def with_alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(len(k)) - (len(k) - len(q) + torch.arange(len(q)))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k.float()) / q.shape[-1] ** 0.5 + 0.05 * distance
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("ntc,cnh->tnh", weights, v.float()).to(q.dtype)


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k.float()) / q.shape[-1] ** 0.5
    weights = (2 * (scores / 2).tanh()).masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("ntc,cnh->tnh", weights, v.float()).to(q.dtype)


def without(places: Callable[[int], torch.Tensor]) -> Any:
    """Attention that does not see some keys, each row its own where it has no other."""

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_self = torch.arange(len(k)) == (len(k) - len(q) + torch.arange(len(q)))[:, None]
        return attend(q, k, v, mask & (is_self | ~places(len(k))))

    return attention(compute)


def channel(x: torch.Tensor, at: int, factor: float) -> torch.Tensor:
    x = x.clone()
    x[at] *= factor
    return x


def noisy(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return x + 0.2 * x.std() * torch.randn(x.shape, generator=generator).to(x)


def rows_noisy(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return x * (1 + 0.05 * torch.randn(len(x), generator=generator)).to(x)[:, None]


def head_negated(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:32] *= -1
    return x


def norms_of_q_and_k(weights: dict[str, torch.Tensor], _config: Any) -> None:
    for name in [name for name in weights if name.endswith("q_norm.weight")]:
        k_name = name.replace("q_norm", "k_norm")
        weights[name], weights[k_name] = weights[k_name], weights[name]


def layers_exchanged(weights: dict[str, torch.Tensor], _config: Any) -> None:
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        next_name = name.replace("layers.1.", "layers.2.")
        weights[name], weights[next_name] = weights[next_name], weights[name]


def last_key_twice(original: Any) -> Any:
    def gather(self: Any, layer: int, slots: torch.Tensor) -> Any:
        return original(self, layer, torch.cat((slots[:-1], slots[-2:-1])) if len(slots) > 1 else slots)

    return gather


def projected(change: Callable[[Any, Any, Any], Any]) -> Any:
    def make(original: Any) -> Any:
        return lambda self, *args: change(*original(self, *args))

    return replacing((Attention, "_project", make))


def first_head_only(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: Any) -> Any:
    v = v.clone()
    v[:, 1:] = 0
    return k, v, slots


def ids_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return replacing((Embedding, "__call__", lambda original: lambda self, ids: original(self, change(ids))))


def layer_norm(_: Any) -> Any:
    def call(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight_X * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    return call


BUGS: dict[str, Bug] = {
    "theta-halved": Bug(inject=frequencies_changed(
        lambda c, f: 1 / ((c.rope.theta / 2) ** (torch.arange(0, len(f) * 2, 2).float() / (2 * len(f))))),
        truth="theta", models=("qwen2-tiny", "qwen3-tiny")),
    "cos-and-sin-exchanged": Bug(inject=rotary(lambda x, cos, sin: x * sin + half_turned(x) * cos),
                                 truth="cosine and sine"),
    "sine-missing": Bug(inject=rotary(lambda x, cos, sin: x * cos), truth="sine is left out"),
    "key-not-rotated": Bug(inject=keys_unrotated(), truth="rotary is not applied"),
    "positions-doubled": Bug(inject=positions_changed(lambda p, chunks: p * 2),
                             truth="factor of 2|factor 0.5|at .*pos"),
    "positions-capped": Bug(inject=positions_changed(lambda p, chunks: p.clamp(max=15)), truth="positions stop at 15"),
    "positions-modulo": Bug(inject=positions_changed(lambda p, chunks: p % 16), truth="taken modulo 16"),
    "second-half-of-the-frequencies-zero": Bug(inject=frequencies_changed(
        lambda c, f: torch.where(torch.arange(len(f)) < len(f) // 2, f, 0)), truth="partial|do not turn"),
    "q-and-k-norms-exchanged": Bug(inject=loaded(norms_of_q_and_k), truth="weight is that of", models=("qwen3-tiny",)),
    "norm-of-mean-size": Bug(inject=norm_scaled_by(
        lambda norm, x: 1 / (x.abs().mean(-1, keepdim=True) + norm.eps)), truth=NOTHING),
    "norm-of-largest": Bug(inject=norm_scaled_by(
        lambda norm, x: 1 / x.abs().amax(-1, keepdim=True)), truth=NOTHING),
    "norm-with-mean": Bug(inject=replacing((RMSNorm, "__call__", layer_norm)), truth="mean"),
    "quick-gelu": Bug(inject=mlp(lambda g, u: g * torch.sigmoid(1.702 * g) * u), truth="quick GELU"),
    "activation-clamped": Bug(inject=mlp(lambda g, u: silu(g).clamp(-0.5, 0.5) * u), truth=NOTHING),
    "up-plus-one": Bug(inject=mlp(lambda g, u: silu(g) * (u + 1)), truth=NOTHING),
    "mish": Bug(inject=mlp(lambda g, u: torch.nn.functional.mish(g) * u), truth=NOTHING),
    "scale-of-seven-eighths": Bug(inject=attention(
        lambda q, k, v, m: attend(q, k, v, m, scale=0.875 * q.shape[-1] ** -0.5)), truth="softmax scale is"),
    "alibi-added": Bug(inject=attention(with_alibi), truth=NOTHING),
    "soft-cap-added": Bug(inject=attention(capped), truth="soft ?cap"),
    "even-keys-only": Bug(inject=without(lambda n: torch.arange(n) % 2 == 1), truth=NOTHING),
    "third-key-unseen": Bug(inject=without(lambda n: torch.arange(n) == 2),
                            truth="position 2|does not see|one position"),
    "first-block-unseen": Bug(inject=without(lambda n: torch.arange(n) < 8), truth="block|first|does not see"),
    "context-heads-rolled": Bug(inject=attention(lambda q, k, v, m: attend(q, k, v, m).roll(1, dims=1)),
                                truth="heads"),
    "context-of-other-values": Bug(inject=attention(lambda q, k, v, m: attend(q, k, v.flip(1), m)),
                                   truth="heads|value"),
    "last-key-twice": Bug(inject=replacing((reference_engine.kv_cache.KVCache, "gather", last_key_twice)),
                          truth="place|slot|block|position|newest|does not see"),
    "value-heads-lost": Bug(inject=stored(first_head_only), truth="head|zeros?"),
    "values-louder": Bug(inject=stored(lambda c, k, v, s: (k, v * 1.01, s)), truth="gain"),
    "keys-noisy": Bug(inject=stored(lambda c, k, v, s: (noisy(k), v, s)), truth=NOTHING),
    "keys-reversed": Bug(inject=stored(lambda c, k, v, s: (k, v, s.flip(0))), truth="slot"),
    "keys-shifted-a-row": Bug(inject=stored(lambda c, k, v, s: (k.roll(1, 0), v, s)),
                              truth="slot|positions? away|another"),
    "query-scaled": Bug(inject=projected(lambda q, k, v: (q * 1.02, k, v)), truth="gain|scaled"),
    "values-in-other-heads": Bug(inject=projected(lambda q, k, v: (q, k, v.flip(1))),
                                 truth="heads|order|written|value|slot"),
    "gate-rows-rolled": Bug(inject=weight("gate_up_proj.weight", lambda w: w.roll(1, 0)),
                            truth="another order|wrong order"),
    "down-rows-noisy": Bug(inject=weight("down_proj.weight", rows_noisy),
                           truth="scales? of|weights are not quite|none of"),
    "down-row-zero": Bug(inject=weight("down_proj.weight", lambda w: channel(w, 17, 0.0)),
                         truth="17|rows? of the weight|not quite"),
    "o-proj-noisy": Bug(inject=weight("o_proj.weight", noisy), truth="not quite|none of|other weights"),
    "first-query-head-negated": Bug(inject=weight("qkv_proj.weight", head_negated), truth="not quite|none of|sign"),
    "layers-exchanged": Bug(inject=loaded(layers_exchanged), truth="weights are those of|weight is that of|layers"),
    "ids-clamped": Bug(inject=ids_changed(lambda ids: ids.clamp(max=200)), truth="token"),
    "ids-reversed": Bug(inject=ids_changed(lambda ids: ids.flip(0)), truth="token"),
    "branch-at-nine-tenths": Bug(inject=branches(lambda x, y: x + 0.9 * y), truth="factor of 0.9"),
    "stream-halved": Bug(inject=branches(lambda x, y: 0.5 * x + y), truth="residual .*0.5|stream"),
    "stream-clamped": Bug(inject=branches(lambda x, y: (x + y).clamp(-1, 1)), truth="are cut off"),
    "branch-dropped-in-odd-rows": Bug(inject=branches(
        lambda x, y: x + y * (torch.arange(len(y)) % 2 == 0)[:, None].to(y.dtype)),
        truth="branch is not added|output is that of attn_residual"),
    "norm-two-heads": Bug(inject=edited_layers(lambda layer: replace(
        layer, input_layernorm=lambda x: layer.input_layernorm(x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)))),
        truth=NOTHING),
}  # fmt: skip


def drawn(name: str, bug: Bug, random: Random) -> Fault:
    """Return a bug as a fault under a drawn setting."""
    setting = FaultConfig(
        model=random.choice(bug.models), dtype=random.choice(DTYPES), schedule=random.choice(SCHEDULES)
    )
    return Fault(
        id=name, category=Category.NUMBERS, summary=".", inject=bug.inject, tap=None, row=None, cause=bug.truth,
        setting=setting,
    )  # fmt: skip


def main(bugs: Mapping[str, Bug]) -> None:
    """Try every bug and print what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(bugs))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    random, rows = Random(arguments.seed), []
    for _ in range(arguments.draws):
        for name, bug in bugs.items():
            fault, seed = drawn(name, bug, random), random.randrange(1000)
            if name in arguments.only:
                rows.append(tried(fault, seed))
                print(*rows[-1], sep=" | ", flush=True)
    if arguments.out:
        arguments.out.write_text(report(rows, arguments), encoding="utf-8")


def tried(fault: Fault, seed: int) -> list[str]:
    """Return a line of the table."""
    setting = fault.setting
    where = f"{setting.model} {setting.dtype} {setting.schedule}"
    try:
        score = score_fault(fault, try_fault(fault, seed=seed))
    except HarnessError as error:
        return [fault.id, where, "-", "not reached", error.what]
    except (RuntimeError, ValueError) as error:  # the broken engine itself
        return [fault.id, where, "-", "raised", type(error).__name__]
    if not score.detected:
        return [fault.id, where, "-", "not detected", ""]
    place = score.first.tap if score.first else str(score.error)
    said = score.explanation.cause if score.explanation else ""
    true = score.explanation is not None and re.search(fault.cause, said + "; " + score.explanation.detail)
    verdict = "unnamed" if score.explanation is None or not score.explanation.is_cause else "named" if true else "WRONG"
    return [fault.id, where, str(place), verdict, said]


def report(rows: list[list[str]], arguments: argparse.Namespace) -> str:
    """Return the report."""
    count = {word: sum(row[3] == word for row in rows) for word in ("named", "unnamed", "WRONG", "not detected")}
    machine = describe_machine("cpu")
    table = tabulate(rows, ["bug", "setting", "found first", "verdict", "said"], tablefmt="github")
    return (
        "# Bugs that are in no catalogue\n\n"
        f"`python {Path(sys.argv[0]).name} --seed {arguments.seed} --draws {arguments.draws}`, "
        f"{time.strftime('%Y-%m-%d')}, {machine.hardware}; {machine.software}.\n\n"
        f"{len(rows)} trials: {count['named']} named, {count['unnamed']} with no cause asserted, "
        f"{count['WRONG']} named wrongly, {count['not detected']} not detected.\n\n{table}\n"
    )


if __name__ == "__main__":
    main(BUGS)
