"""Sound servers pass in every way of sending; wrong ones are found, and by what."""

import asyncio
import json
import shutil
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.faults.catalogue import choose
from harness.extensions.server.address import Address
from harness.extensions.server.check.report import endpoint_json, endpoint_text
from harness.extensions.server.check.run import check_endpoint
from harness.extensions.server.completion import Dialect
from harness.extensions.server.probe import Probed, parameters
from harness.results.check import Outcome

from ..served import serve
from .conftest import PROMPTS, asked_otherwise, changed, changed_events, make_plan, reply

WAYS = ["together", "repeated", "alone", "reversed", "continued", "streamed", "prompt", "plain", "text", "several"]


@contextmanager
def served(folder, **options):
    with serve(folder, max_num_seqs=16, enable_prefix_caching=True, **options) as server:
        yield server.address()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sound_server_passes_in_every_way(folder, dtype):
    with served(folder, dtype=dtype) as address:
        result = check_endpoint(make_plan(folder, dtype=dtype), address)
    assert [run.schedule for run in result.runs] == WAYS
    assert {run.outcome for run in result.runs} == {Outcome.PASS}
    assert not [run.findings for run in result.runs if run.findings]
    together = result.runs[0]
    assert (together.num_requests, together.num_failed, together.num_tokens) == (4, 0, 32)
    assert together.tokens.compared == 32
    assert [logprobs.kind for logprobs in together.logprobs] == ["chosen", "top"]
    assert together.logprobs[1].num_values == 5 * 32
    by_way = {run.schedule: [logprobs.kind for logprobs in run.logprobs] for run in result.runs}
    assert (by_way["prompt"], by_way["plain"], by_way["text"]) == (["chosen", "top", "prompt"], [], [])
    assert all(0 < logprobs.rms_ratio <= logprobs.rms_bound for run in result.runs for logprobs in run.logprobs)


def test_what_the_probe_finds(folder, server):
    _, url = server
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=0)
    assert (result.server, result.served_model) == ("reference_engine", "tiny")
    assert {capability.name for capability in result.capabilities if capability.is_there} == {
        "/health", "/v1/models", "token id prompts", "logprobs", "return_token_ids", "return_tokens_as_token_ids",
        "ignore_eos", "repetition_penalty", "prompt logprobs", "streaming", "/tokenize",
        "temperature", "top_k", "top_k of -1", "top_p", "min_p", "seed", "stop", "n of 2",
        "draws without a seed",
    }  # fmt: skip
    assert not [capability.name for capability in result.capabilities if capability.is_ignored]


def with_config(folder, tmp_path, **fields):
    """A copy of a checkpoint whose config.json says something else."""
    changed_folder = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((changed_folder / "config.json").read_text())
    for name, value in fields.items():
        (config["rope_parameters"] if name == "rope_theta" else config)[name] = value
    (changed_folder / "config.json").write_text(json.dumps(config))
    return changed_folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_rope_base_is_found_by_the_root_mean_square(folder, tmp_path, dtype):
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    changed_folder = with_config(folder, tmp_path, rope_theta=2 * theta)
    prompts = [[1, *range(5 + at, 25 + at), 3, *range(5 + at, 9 + at)] for at in range(6)]
    plan = make_plan(folder, dtype=dtype, prompts=prompts, max_new_tokens=16)
    with served(changed_folder, dtype=dtype) as address:
        result = check_endpoint(plan, address, num_again=0)
    (run,) = result.runs
    assert result.outcome is Outcome.MISMATCH
    assert any(finding.code == "H117" and "root mean square" in finding.message for finding in run.findings)
    assert max(logprobs.rms_ratio for logprobs in run.logprobs) > 3


def test_a_mistake_of_the_whole_model_is_named(folder, tmp_path):
    with served(with_config(folder, tmp_path, rope_theta=5000.0)) as address:
        result = check_endpoint(make_plan(folder, explain_s=60), address, num_again=0)
    assert result.explanation.is_cause
    assert result.explanation.cause == "rotary theta is 5000 instead of 1e+06"
    assert "  Cause: rotary theta is 5000 instead of 1e+06; every row; it takes" in endpoint_text(result, width=100)
    assert endpoint_json(result)["explanation"]["is_cause"] is True


@pytest.mark.slow
def test_a_size_of_errors_that_hf_makes_in_another_dtype_is_told(folder):
    with served(folder, dtype="bfloat16") as address:
        result = check_endpoint(make_plan(folder, explain_s=0.5), address, num_again=0)
    assert result.outcome is Outcome.MISMATCH
    assert not result.explanation.is_cause
    assert "times the error that HF makes with products in bfloat16" in result.explanation.detail


def test_one_answer_that_is_wrong_is_no_mistake_of_the_model(folder, server):
    app, url = server
    app.spoil = changed(lambda answer: answer["choices"][0]["logprobs"] and shifted(answer))
    result = check_endpoint(make_plan(folder, explain_s=60), Address(url=url), num_again=0)
    assert result.outcome is Outcome.MISMATCH
    assert result.explanation is None


def shifted(answer):
    logprobs = answer["choices"][0]["logprobs"]
    logprobs["token_logprobs"] = [value - 0.1 for value in logprobs["token_logprobs"]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_planted", [True, False])
def test_a_prefix_taken_for_another_is_found_where_prompts_are_repeated(folder, is_planted):
    (fault,) = choose(["collision-taken-for-a-hit"])
    prompts = [list(prompt) for prompt in fault.setting.prompts]
    plan = make_plan(folder, prompts=prompts)
    with fault.inject() if is_planted else nullcontext(), served(folder, dtype="float32", block_size=8) as address:
        result = check_endpoint(plan, address)
    wrong = {run.schedule for run in result.runs if run.findings}
    assert ("repeated" in wrong) == is_planted
    assert (result.outcome is Outcome.MISMATCH) == is_planted


def test_a_server_of_text_is_judged_by_its_text(folder, server):
    app, url = server
    seen = []

    async def text_alone(inner, scope, receive, send, body):
        """Refuse token ids and the fields that name them."""
        seen.append(body)
        fields = {"return_token_ids", "return_tokens_as_token_ids", "ignore_eos"}
        if isinstance(body["prompt"], str) and not fields & body.keys():
            await inner(scope, receive, send)
        else:
            await reply(send, b'{"error": {"message": "text alone"}}', status=400)

    app.spoil, app.spoils_all = text_alone, True
    plan = make_plan(folder, prompts=[PROMPTS[0], PROMPTS[3]], max_new_tokens=6)
    result = check_endpoint(plan, Address(url=url), num_again=1)
    assert result.outcome is Outcome.PASS
    assert {"token id prompts", "return_token_ids"} <= {
        capability.name for capability in result.capabilities if not capability.is_there
    }
    assert result.runs[0].tokens.compared == 3 + 6  # the first ends at its end of text
    assert all(isinstance(body["prompt"], str) for body in seen[1:])


def without_echo(at):
    """Leave a token out of the log probabilities of an echo."""

    def forget(answer):
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs and logprobs["token_logprobs"][0] is None:
            for values in logprobs.values():
                del values[at]
            logprobs["token_logprobs"][0] = None

    return changed(forget)


@pytest.mark.slow
def test_an_echo_without_its_first_token_is_read(folder, server):
    """llama-cpp-python's echo leaves the begin-of-text token out."""
    app, url = server
    app.spoil, app.spoils_all = without_echo(0), True
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=4)
    assert result.outcome is Outcome.PASS
    (prompt,) = [item for run in result.runs for item in run.logprobs if item.kind == "prompt"]
    assert prompt.num_values == sum(len(ids) - 2 for ids in PROMPTS)


@pytest.mark.slow
def test_an_echo_without_its_last_token_lacks_that_and_no_other(folder, server):
    """llama-cpp-python's, where no token begins a text."""
    app, url = server
    app.spoil, app.spoils_all = without_echo(-1), True
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=4)
    (prompt,) = [item for run in result.runs for item in run.logprobs if item.kind == "prompt"]
    assert prompt.num_values == sum(len(ids) - 1 for ids in PROMPTS)
    findings = [finding for run in result.runs for finding in run.findings]
    assert {finding.position - len(PROMPTS[finding.request]) for finding in findings} == {0}
    assert "none of 1 log probabilities of the new tokens are there" in {
        item.message.partition(";")[0] for item in findings
    }


def test_a_server_that_takes_no_temperature_above_two_is_asked_at_two(folder, server):
    """OpenAI's servers and vLLM's: what shows at a temperature of 100 alone is no parameter that the server lacks."""
    app, url = server

    async def refuse_heat(inner, scope, receive, send, body):
        if body["temperature"] > 2:
            await reply(send, b'{"error": {"message": "temperature must be in [0, 2]"}}', status=400)
        else:
            await inner(scope, receive, send)

    app.spoil, app.spoils_all = refuse_heat, True
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=0)
    assert {"temperature", "top_k", "top_p", "seed"} <= {
        capability.name for capability in result.capabilities if capability.is_there
    }


def test_a_penalty_that_leaves_the_prompt_out_is_not_called_ignored():
    """llama-cpp-python's: where an answer repeats no token of its own, nothing shows it."""

    class Deaf:
        async def post(self, _path, _body):
            return {"choices": [{"text": "abc", "token_ids": [5, 6, 7], "finish_reason": "length"}]}

    probed = Probed(dialect=Dialect(model="m", options=(("repeat_penalty", 1.0),)))
    asyncio.run(parameters(Deaf(), probed, [5, 6], SimpleNamespace(has=lambda _token_id: True, is_there=False)))
    (penalty,) = [capability for capability in probed.capabilities if capability.name == "repeat_penalty"]
    assert (penalty.is_ignored, penalty.detail) == (False, "taken; the answer repeats no token, so nothing shows it")


def test_a_penalty_shows_in_tokens_whose_log_probabilities_are_sound(folder, server):
    app, url = server
    app.spoil, app.spoils_all = asked_otherwise(lambda body: body | {"repetition_penalty": 1.5}), True
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=0)
    assert {finding.code for finding in result.runs[0].findings} == {"H048"}
    assert any("the server penalises or draws" in note for note in result.notes)


def test_tokens_alone_are_judged_where_there_are_no_logprobs(folder, server):
    app, url = server
    app.spoil, app.spoils_all = changed(lambda answer: answer["choices"][0].update(logprobs=None)), True
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=0)
    assert result.outcome is Outcome.PASS
    assert result.runs[0].logprobs == ()
    assert any("no log probabilities" in note for note in result.notes)


def test_both_reports_say_what_was_found(folder, server):
    app, url = server
    app.spoil = changed(lambda answer: answer["choices"][0]["logprobs"] and positive(answer))
    result = check_endpoint(make_plan(folder), Address(url=url), num_again=1)
    text = endpoint_text(result, width=80)
    assert text.startswith(f"MISMATCH  reference_engine at {url} · qwen3-tiny · float32 · 4 prompts\n")
    assert "H117" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    document = json.loads(json.dumps(endpoint_json(result), allow_nan=False))
    assert document["verdict"] == "mismatch"
    assert {finding["code"] for finding in document["findings"]} == {"H117"}
    assert document["runs"][0]["logprobs"][0]["rms_ratio"] > 0


def positive(answer):
    answer["choices"][0]["logprobs"]["token_logprobs"][0] = 0.5


def test_what_was_not_asked_is_said_with_its_sizes(server, folder):
    _, url = server
    result = check_endpoint(make_plan(folder, prompts=[[*range(3, 20)]], max_new_tokens=5), Address(url=url))
    (note,) = [note for note in result.notes if note.startswith("not asked: ")]
    # half of an answer is sent behind its prompt once more, and a prompt twice at once
    assert "prompts of more than 19 tokens, more than 5 new tokens, more than " in note
    assert "streams without log probabilities, answers to an end of text, chats, " in note
    assert 2 <= int(note.partition(" requests at once")[0].split()[-1]) <= 8
    fields = note.partition("fields besides ")[2].split(", ")
    assert {"max_tokens", "prompt", "stop"} <= set(fields)
    assert not {"user", "stream_options", "suffix"} & set(fields)


def test_a_stream_without_log_probabilities_is_judged(plan, server):
    """Most clients ask for one."""
    app, url = server

    async def garbled(choice, _number):
        choice["text"] = "garbage"

    async def spoil(inner, scope, receive, send, body):
        is_plain = body.get("stream") and not body.keys() & {"logprobs", "return_token_ids"}
        await (changed_events(garbled)(inner, scope, receive, send, body) if is_plain else inner(scope, receive, send))

    app.spoil, app.spoils_all = spoil, True
    result = check_endpoint(plan, Address(url=url, retries=0))
    assert {run.schedule for run in result.runs if run.findings} == {"plain"}
