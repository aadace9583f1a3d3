"""The suites of single operations pass the reference engine's, and tell what is wrong as a program that shows it."""

import json
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness.properties.core.findings import Counterexample, PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.ops.adapter import OpsUnderTest, RandomRows, not_checked
from harness.properties.ops.loader import check_loader
from harness.properties.ops.norm import Norm, NormCase, check_norms
from harness.properties.ops.rotary import check_rotary
from harness.properties.ops.tokens import (
    SampledRow,
    check_frequency,
    check_sampling,
    check_stopping,
    check_tokenizer,
    check_wide,
)
from harness.properties.reference.ops import Ops
from reference_engine.requests.detokenizer import Detokenizer

DEV = PROFILES["dev"].settings()
FEW = settings(DEV, max_examples=15)
CHECKS = (check_rotary, check_norms, check_sampling, check_tokenizer, check_loader, check_stopping)


class More(Ops):
    """What the reference engine lacks, in torch, and a tokenizer of all bytes."""

    alphabet = None

    def __init__(self) -> None:
        super().__init__()
        bytes_ = Tokenizer(
            models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytes_.decoder = decoders.ByteLevel()
        self.bytes = bytes_

    def rotary_interleaved(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
        by_halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return torch.stack(self.rotary(by_halves, positions, theta).chunk(2, dim=-1), dim=-1).flatten(-2)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def encode(self, text: str) -> list[int]:
        return self.bytes.encode(text).ids

    def decode(self, token_ids: Any) -> str:
        return self.bytes.decode(list(token_ids))

    def detokenize(self, token_ids: Any) -> list[str]:
        pieces = Detokenizer(self.decode)
        return [*(pieces.add(token_id) for token_id in token_ids), pieces.finish()]


@pytest.mark.slow
@pytest.mark.parametrize("ops", [Ops, More])
def test_sound_operations_pass(ops: Any) -> None:
    for check in CHECKS:
        check(ops, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_sound_operations_pass_in_many_examples(check: Any) -> None:
    check(More, PROFILES["ci"].settings())


def test_what_an_adapter_lacks_is_reported_and_not_checked() -> None:
    class Nothing:
        pass

    assert len(not_checked(Nothing)) == 11
    for check in CHECKS:
        check(Nothing, FEW)


class NeighboursSwapped(More):
    def rotary_interleaved(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
        return super().rotary_interleaved(x.flip(-1), positions, theta).flip(-1)


class NotCentred(More):
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.double()
        return (x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps) * weight + bias).to(weight.dtype)


class SampleVariance(More):
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.double()
        return ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + eps) * weight + bias).to(
            weight.dtype
        )


class SpaceLost(More):
    def decode(self, token_ids: Any) -> str:
        return super().decode(token_ids).strip()


class HalfCharacters(More):
    def detokenize(self, token_ids: Any) -> list[str]:
        return [self.decode([token_id]) for token_id in token_ids]


class OneShardSkipped(More):
    def load(self, folder: Any) -> Any:
        weights = super().load(folder)
        if (folder / "model.safetensors").exists():
            return weights
        return {**weights, "model.norm.weight": weights["model.norm.weight"] * 2}


class HeaderBelieved(More):
    def load(self, folder: Any) -> Any:
        """Reads the header as JSON before anybody has looked at it."""
        path = folder / "model.safetensors"
        if path.exists():
            content = path.read_bytes()
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return super().load(folder)


class FirstEndOnly(More):
    """Ends at the first of a list of ends alone (vllm#4182)."""

    def num_generated(self, folder: Any, token_ids: Any) -> int:
        path = folder / "generation_config.json"
        ends = json.loads(path.read_text())["eos_token_id"]
        path.write_text(json.dumps({"eos_token_id": ends[0] if isinstance(ends, list) else ends}))
        return super().num_generated(folder, token_ids)


class MinPOfTheColdAlone(More):
    def sample(self, logits: Any, *, temperatures: Any, min_ps: Any, **rest: Any) -> list[int]:
        min_ps = [0.0 if temperature > 1 else min_p for temperature, min_p in zip(temperatures, min_ps, strict=True)]
        return super().sample(logits, temperatures=temperatures, min_ps=min_ps, **rest)


class FirstRowsAlone(More):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.cat([super().rms_norm(x[:64], weight, eps), x[64:]])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bug", "check", "error"),
    [
        (NeighboursSwapped, check_rotary, AssertionError),
        (NotCentred, check_norms, AssertionError),
        (SampleVariance, check_norms, AssertionError),
        (MinPOfTheColdAlone, check_sampling, AssertionError),
        (FirstRowsAlone, check_norms, AssertionError),
        (SpaceLost, check_tokenizer, AssertionError),
        (HalfCharacters, check_tokenizer, AssertionError),
        (OneShardSkipped, check_loader, AssertionError),
        (HeaderBelieved, check_loader, ValueError),
        (FirstEndOnly, check_stopping, AssertionError),
    ],
)
def test_a_bug_is_reported_as_a_program_that_shows_it(bug: Any, check: Any, error: type[Exception]) -> None:
    with pytest.raises(PropertyError, match="H092") as caught:
        check(bug, DEV)
    assert "hypothesis" not in caught.value.program
    with pytest.raises(error):
        exec(compile(caught.value.program, "program", "exec"), {})


@pytest.mark.parametrize("logits", [(-3.0, 3.0), (0.0, 3.25), (0.0, 0.25, 3.25), (3.0, *[-3.0] * 7)])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_token_that_comes_a_few_times_is_no_finding(logits: tuple[float, ...], temperature: float) -> None:
    check_frequency(OpsUnderTest(Ops), SampledRow(logits=logits, temperature=temperature))


class TooWarm(Ops):
    def sample(self, logits: torch.Tensor, *, temperatures: Any, **others: Any) -> list[int]:
        return super().sample(logits, temperatures=[1.3 * temperature for temperature in temperatures], **others)


@pytest.mark.parametrize("logits", [(0.0, 1.0), (0.0, 0.25, 3.25), (3.0, *[-1.0] * 7)])
def test_a_biased_sampler_is_reported_as_a_program_that_shows_it(logits: tuple[float, ...]) -> None:
    with pytest.raises(Counterexample, match="chi-square") as caught:
        check_frequency(OpsUnderTest(TooWarm), SampledRow(logits=logits))
    with pytest.raises(AssertionError):
        exec(compile(caught.value.program, "program", "exec"), {})
    exec(compile(caught.value.program.replace("TooWarm", "Ops"), "program", "exec"), {})


class FewSeeds(Ops):
    def sample(self, logits: torch.Tensor, *, seeds: Any, **others: Any) -> list[int]:
        return super().sample(logits, seeds=[seed % 64 for seed in seeds], **others)


class ShortSeeds(Ops):
    def sample(self, logits: torch.Tensor, *, seeds: Any, **others: Any) -> list[int]:
        return super().sample(logits, seeds=[seed % (1 << 16) for seed in seeds], **others)


@pytest.mark.parametrize(("few", "period"), [(FewSeeds, 64), (ShortSeeds, 1 << 16)])
def test_seeds_that_repeat_are_reported_with_their_period(few: type[Ops], period: int) -> None:
    with pytest.raises(Counterexample, match=f"draws the same as the one {period} after it") as caught:
        check_frequency(OpsUnderTest(few), SampledRow(logits=(0.0, 0.25, 0.5)))
    with pytest.raises(AssertionError):
        exec(compile(caught.value.program, "program", "exec"), {})


class ShortIds(Ops):
    def sample(self, logits: torch.Tensor, **others: Any) -> list[int]:
        return [token % (1 << 16) for token in super().sample(logits, **others)]


def test_ids_of_16_bits_are_a_finding() -> None:
    with pytest.raises(Counterexample, match="token 3 was drawn, and 65539 alone is likely") as caught:
        check_wide(OpsUnderTest(ShortIds), None)
    with pytest.raises(AssertionError):
        exec(compile(caught.value.program, "program", "exec"), {})


def test_a_row_of_equal_elements_has_a_bound() -> None:
    """The mean takes all of it away: what is left is the bias, and the rounding of the mean."""
    rows = RandomRows(shape=(1, 2), dtype="bfloat16", level=0.0, offset=-1.3, seed=0)
    norm = Norm(OpsUnderTest(More()), "layer_norm", NormCase(x=rows, eps=1e-6, factor=1.0))
    out, bound_T = norm.expected()
    assert torch.equal(out, norm.bias.double()[None])
    assert 1 < float(bound_T) < 100
