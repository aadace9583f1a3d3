"""Workloads: seeded, and of the lengths that are asked for."""

from harness.extensions.bench.peer import UnevenSize, even_workload, uneven_workload

SIZE = UnevenSize(num_requests=40, prompt_lens=(3, 9), output_lens=(2, 5))


def test_even_requests_have_one_length():
    workload = even_workload(3, prompt_len=7, output_len=5, vocab_size=100, seed=0)
    assert [len(prompt) for prompt in workload.prompts] == [7, 7, 7]
    assert (list(workload.output_lens), workload.num_output_tokens) == ([5, 5, 5], 15)
    assert workload.mean_decode_context == 9.5


def test_uneven_requests_reach_both_ends_of_their_ranges():
    workload = uneven_workload(SIZE, vocab_size=100, seed=0)
    assert {len(prompt) for prompt in workload.prompts} == set(range(3, 10))
    assert set(workload.output_lens) == {2, 3, 4, 5}


def test_a_seed_gives_the_same_requests_and_another_one_others():
    first, again, another = (uneven_workload(SIZE, vocab_size=100, seed=seed) for seed in (0, 0, 1))
    assert first == again != another


def test_tokens_are_of_the_vocabulary():
    workload = even_workload(8, prompt_len=50, output_len=1, vocab_size=3, seed=0)
    assert {token for prompt in workload.prompts for token in prompt} == {0, 1, 2}
