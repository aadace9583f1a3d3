"""HF's code is changed for the time of a run, nothing of a change stays, and the right change is named."""

import ast
import linecache
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, GraniteConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.granite.modeling_granite import GraniteDecoderLayer, GraniteMLP, GraniteRMSNorm

import harness
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.edits.code import code_of, lines_run
from harness.judge.explain.edits.limits import Meter, TooMuchError, limited

PROMPT = [5, 17, 99, 23, 64, 8, 41, 30, 77]


def granite():
    config = GraniteConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, residual_multiplier=0.4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    return model


def half_activated(self, x):
    up = self.up_proj(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * up * up)


def test_a_change_that_nobody_wrote_down_is_named(tmp_path, monkeypatch):
    model = granite()
    model.save_pretrained(tmp_path)

    right = GraniteDecoderLayer.forward
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp, "forward", half_activated.__get__(layer.mlp))
    report = harness.check(model, model=tmp_path, prompts=[PROMPT], max_new_tokens=2, schedules=["plain"])
    explanation = report.first_divergence.explanation
    assert explanation.is_cause
    assert "in GraniteMLP (modeling_granite.py:" in explanation.cause
    assert "`self.act_fn(self.gate_proj(x)) * self.up_proj(x)`" in explanation.cause
    assert "- down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))" in explanation.detail
    assert GraniteDecoderLayer.forward is right


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("has_own", [False, True])
def test_nothing_of_a_change_stays(has_own):
    module = GraniteMLP(GraniteConfig(hidden_size=8, intermediate_size=8))
    if has_own:
        module.forward = lambda x: x
    before = dict(vars(module))

    def interrupt():
        with replaced(module, "forward", len):
            assert module.forward is len
            raise Interrupted

    with pytest.raises(Interrupted):
        interrupt()
    assert vars(module) == before


def counting_down(self, x):
    left = 3
    while left > 0:
        left -= 1
    return x


def counting_down_whatever_is_raised(self, x):
    left = 3
    while left > 0:
        try:
            left -= 1
        except BaseException:
            continue
    return x


counting_down.__module__ = counting_down_whatever_is_raised.__module__ = "transformers.models.made"


def code_in(kind, **changes):
    module = kind(GraniteConfig(hidden_size=8, intermediate_size=8))
    return code_of("mlp", module, "forward", changes.get("forward", kind.forward))


def test_the_changed_code_runs_in_the_place_of_the_right_one():
    code = code_in(GraniteMLP)
    x = torch.randn(3, 8)
    right = code.holder(x)
    change = next(item for item in code.changes() if "no activation is applied" in item.tell(1.0).cause)
    with change.make(1.0):
        assert not torch.equal(code.holder(x), right)
    assert torch.equal(code.holder(x), right)
    assert "in GraniteMLP (modeling_granite.py:" in change.tell(1.0).cause


def test_a_factor_is_put_into_the_changed_code():
    norm = GraniteRMSNorm(8, eps=0.5)
    code, x = code_of("norm", norm, "forward", GraniteRMSNorm.forward), torch.randn(3, 8)
    change = next(item for item in code.changes() if "`self.variance_epsilon` is mult" in item.tell(2.0).cause)
    assert change.tell(2.0).cause.endswith("`self.variance_epsilon` is multiplied by 2")
    assert "_fitted" not in change.tell(2.0).detail
    with change.make(2.0):
        actual = norm(x)
    torch.testing.assert_close(actual, GraniteRMSNorm(8, eps=1.0)(x))


def test_code_that_did_not_run_is_not_changed():
    norm = GraniteRMSNorm(8)
    code = code_of("norm", norm, "forward", GraniteRMSNorm.forward)
    with lines_run() as lines:
        norm(torch.randn(3, 8))
    assert len(code.changes(lines)) == len(code.changes()) > 50
    assert code.changes({}) == []


def test_the_tracer_of_lines_is_as_before_after_an_error():
    before = sys.gettrace()

    def interrupt():
        with lines_run():
            raise Interrupted

    with pytest.raises(Interrupted):
        interrupt()
    assert sys.gettrace() is before


def without_up(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)))


def test_a_change_by_which_a_module_does_not_run_is_named(tmp_path, monkeypatch):
    model = granite()
    model.save_pretrained(tmp_path)
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp, "forward", without_up.__get__(layer.mlp))
    report = harness.check(model, model=tmp_path, prompts=[PROMPT], max_new_tokens=2, schedules=["plain"])
    assert "the product with up is missing" in report.first_divergence.explanation.cause


def test_a_name_of_the_code_is_no_fitted_number():
    config = DeepseekV3Config(hidden_size=8, n_routed_experts=4, n_group=1, topk_group=1)
    router = DeepseekV3TopkRouter(config)
    code = code_of("gate", router, "forward", DeepseekV3TopkRouter.forward)
    told = [change.tell(2.0) for change in code.changes()]
    assert any("self.routed_scaling_factor" in item.detail for item in told)
    assert not any("routed_scaling2" in item.cause + item.detail for item in told)


def test_code_that_is_not_of_transformers_is_left_alone(monkeypatch):
    assert code_of("", nn.Linear(1, 1), "forward", nn.Linear.forward) is None
    space = {"__name__": "transformers.models.made"}
    exec("def forward(self, x):\n    return x", space)
    assert code_of("", nn.Identity(), "forward", space["forward"]) is None  # there is no source
    monkeypatch.setattr(linecache, "getlines", lambda *_: ["import sys\n"])  # a source of something else
    assert code_of("", nn.Identity(), "forward", space["forward"]) is None


def test_a_layer_norm_of_torch_is_written_out():
    norm = nn.LayerNorm(8, eps=1e-3, dtype=torch.float64)
    norm.weight.data, norm.bias.data = torch.rand(8).double(), torch.rand(8).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    code = code_of("norm", norm, "forward", nn.LayerNorm.forward)
    torch.testing.assert_close(code.function(norm, x), norm(x))
    causes = [change.tell(1.0).cause for change in code.changes()]
    assert any(cause.startswith("the mean is not subtracted: in LayerNorm") for cause in causes)


def of_all_pairs(x):
    return x * x.T  # 32 GB of a column of 65,536 rows, which are not taken


def kept_for_ever(_):
    kept = []
    while True:
        kept.append(torch.zeros(1 << 20))


def endless_sums(x):
    while True:
        x.sum()


@pytest.mark.parametrize("program", [of_all_pairs, kept_for_ever, endless_sums])
def test_a_trial_that_takes_far_more_than_the_right_code_is_ended(program):
    x = torch.ones(1 << 16, 1)
    with Meter() as right:
        x + x
    with limited(right):
        x * x
    with pytest.raises(TooMuchError), limited(right):
        program(x)


@pytest.mark.parametrize("function", [counting_down, counting_down_whatever_is_raised])
def test_a_change_by_which_a_loop_never_ends_is_ended(function):
    """It calls no function of torch, and may catch what is raised in it."""
    code = code_in(GraniteMLP, forward=function)
    edit = next(edit for edit in code.edits() if (edit.old, edit.new) == ("left -= 1", "is left out"))
    before = ast.unparse(code.program)
    with pytest.raises(TooMuchError), code.made(edit, 1.0), limited(Meter()):
        code.holder(torch.ones(1))
    assert ast.unparse(code.program) == before


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.repeat(1 << 48), lambda x: x.repeat_interleave(1 << 48),
        lambda x: torch.zeros(1 << 58, device=x.device),
    ],
    ids=["repeat", "repeat_interleave", "zeros"],
)  # fmt: skip
def test_what_grows_by_a_number_is_ended_before_it_is_made(program):
    """No memory holds the result: without the limit, the function itself raises."""
    with pytest.raises(TooMuchError), limited(Meter()):
        program(torch.ones(8))


def test_attention_without_a_key_head_raises():
    """Without the meter, this call ends the process: torch 2.13 divides by the number of key heads."""
    q, k, v = (torch.ones(1, heads, 5, 8) for heads in (4, 0, 2))
    with pytest.raises(ValueError, match="key head"), limited(Meter()):
        nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
