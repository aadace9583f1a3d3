"""Files of workloads: what was found can be run again, and what is no workload is refused with its field."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.fuzz.files import case_toml, load_workload, workload_toml
from harness.extensions.fuzz.result import FuzzFinding, SentRequest, SentWorkload
from harness.formats.case import load_case

PLAIN = SentRequest(token_ids=(5, 6, 7), prompt_length=2)
WORKLOAD = SentWorkload(
    requests=(
        PLAIN,
        SentRequest(token_ids=(5, 6, 7, 8), prompt_length=2, fork_of=0),
        SentRequest(token_ids=(9,), prompt_length=1, arrival=4, is_aborted=True),
    ),
    limits={"block_size": 4, "enable_prefix_caching": True},
)


def finding(workload):
    return FuzzFinding(
        signature='H040: "attention" äß𝄞\n', workload=workload, run=None, error=None, found_s=1.0, shrunk_s=1.0,
        num_rows_found=9, num_requests_found=3,
    )  # fmt: skip


@pytest.fixture
def plan(tmp_path):
    case = SimpleNamespace(engine="reference", dtype="float32", device="cpu")
    return SimpleNamespace(folder=tmp_path, case=case, engine_options={"debug_checks": "true"})


@pytest.mark.parametrize("fault", [None, "wrong-block"])
@pytest.mark.parametrize("workload", [WORKLOAD, SentWorkload(requests=(PLAIN,), schedule="chunked:3")])
def test_a_file_says_all_of_a_workload(tmp_path, plan, workload, fault):
    path = tmp_path / "found.workload.toml"
    path.write_text(workload_toml(finding(workload), plan, fault), encoding="utf-8")
    file = load_workload(path)
    assert file.workload() == workload
    assert file.description == 'found by harness fuzz: H040: "attention" äß𝄞\n'
    assert (file.model, file.engine, file.dtype, file.fault) == (str(tmp_path), "reference", "float32", fault)
    assert file.engine_options == {"debug_checks": "true"}


GOOD = 'schema_version = 1\nmodel = "m"\nengine = "reference"\ndtype = "float32"\n'
REQUEST = "[[requests]]\ntoken_ids = [5, 6]\nprompt_length = 2\n"
LONG = "[[requests]]\ntoken_ids = [5, 6, 7]\nprompt_length = 1\n"
FORK = "[[requests]]\ntoken_ids = [5, 6, 8]\nprompt_length = 1\nfork_of = 0\n"


def test_the_model_may_be_relative_to_the_file(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "w.toml").write_text(GOOD + REQUEST)
    assert Path(load_workload(tmp_path / "w.toml").model) == tmp_path / "m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "schema_version"),
        ("schema_version = ", "cannot be read"),
        (GOOD, "requests"),
        (GOOD.replace("1", "2") + REQUEST, "schema_version"),
        (GOOD + 'schedule = "odd"\n' + REQUEST, "unknown schedule"),
        (GOOD + "[limits]\nbatch = 3\n" + REQUEST, "limits"),
        (GOOD + "[limits]\nblock_size = 0\n" + REQUEST, "limits"),
        (GOOD + REQUEST.replace("2\n", "3\n"), "prompt_length 3 exceeds the 2"),
        (GOOD + REQUEST.replace("[5, 6]", "[]"), "token_ids"),
        (GOOD + REQUEST.replace("[5, 6]", "[-5, 6]"), "token_ids"),
        (GOOD + REQUEST + "arrival = -1\n", "arrival"),
        (GOOD + REQUEST.replace("2\n", "1\n") + "fork_of = 0\n", "another request's number"),
        (GOOD + REQUEST.replace("2\n", "1\n") + "fork_of = 1\n", "another request's number"),
        (GOOD + REQUEST + "color = 3\n", "color"),
        (GOOD + REQUEST + FORK, "does not go on from prompt and first token of request 0"),  # it has made one token
        (GOOD + LONG.replace("6", "9") + FORK, "does not go on"),
        (GOOD + LONG.replace("= 1", "= 2") + FORK, "does not go on"),
        (GOOD + LONG + FORK + FORK.replace("fork_of = 0", "fork_of = 1"), "does not go on"),
    ],
)
def test_what_is_no_workload_is_refused(tmp_path, text, said):
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(HarnessError, match=said) as caught:
        load_workload(path)
    assert caught.value.code is Code.BAD_CASE


def test_a_fork_that_goes_on_from_its_original_is_sound(tmp_path):
    (tmp_path / "w.toml").write_text(GOOD + LONG + FORK)
    assert load_workload(tmp_path / "w.toml").workload().requests[1].fork_of == 0


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(HarnessError) as caught:
        load_workload(tmp_path / "none.toml")
    assert caught.value.code is Code.BAD_CASE


def test_a_case_says_prompts_lengths_and_limits(tmp_path, plan):
    (tmp_path / "config.json").write_text("{}")
    workload = SentWorkload(requests=(PLAIN, PLAIN), limits={"num_blocks": 4, "enable_prefix_caching": True})
    (tmp_path / "case.toml").write_text(case_toml(finding(workload), plan) or "", encoding="utf-8")
    case = load_case(tmp_path / "case.toml")
    assert [(request.token_ids, request.max_new_tokens) for request in case.requests] == [([5, 6], 2)] * 2
    assert case.schedules == ["plain"]
    assert case.engine_options == {
        "max_num_seqs": "256", "num_blocks": "4", "enable_prefix_caching": "true", "debug_checks": "true"
    }  # fmt: skip


def test_a_case_decodes_or_a_sound_engine_would_fail_it(tmp_path, plan):
    (tmp_path / "config.json").write_text("{}")
    workload = SentWorkload(requests=(SentRequest(token_ids=(5, 6), prompt_length=2),))
    (tmp_path / "case.toml").write_text(case_toml(finding(workload), plan) or "", encoding="utf-8")
    assert load_case(tmp_path / "case.toml").requests[0].max_new_tokens == 2


def test_no_case_can_say_arrivals_aborts_and_forks(plan):
    assert case_toml(finding(WORKLOAD), plan) is None
    for request in (
        SentRequest(token_ids=(5,), prompt_length=1, arrival=1),
        SentRequest(token_ids=(5,), prompt_length=1, is_aborted=True),
    ):
        assert case_toml(finding(SentWorkload(requests=(PLAIN, request))), plan) is None
