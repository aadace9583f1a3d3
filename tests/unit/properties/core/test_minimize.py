"""What a finding is made of: the smallest example, and the program that tells it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from harness.errors import Code, HarnessError
from harness.properties.core.findings import Invariant, PropertyError, PropertyFinding, Violation
from harness.properties.core.machine import Machine, NotApplicable, action
from harness.properties.core.minimize import minimize
from harness.properties.core.subject import Subject


class Counter:
    """Breaks when it has counted to five in steps of three or more."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.total = 0

    def add(self, number: int, words: list[int]) -> int:
        self.total += number
        return self.total

    def fail(self) -> None:
        raise ValueError("no")


class CounterMachine(Machine):
    def start_arguments(self) -> Any:
        return {"num_blocks": st.integers(1, 9), "block_size": st.just(1)}

    def start(self, num_blocks: int, block_size: int) -> None:
        self.subject = Subject(Counter, "counter", num_blocks=num_blocks, block_size=block_size)
        self.total = 0

    @action(number=st.integers(0, 9), words=st.lists(st.integers(0, 3)))
    def add(self, number: int, words: list[int]) -> None:
        if number < 3:
            raise NotApplicable
        self.total = self.subject.do(Invariant.POOL_PARTITION, "add", number, words)

    def check(self) -> None:
        if self.total >= 5:
            raise Violation(Invariant.POOL_PARTITION, f"it counts {self.total}", "assert result < 5")

    def drain(self) -> None:
        pass


def test_steps_and_arguments_become_as_small_as_they_can() -> None:
    trace = [
        ("start", {"num_blocks": 8, "block_size": 1}),
        ("add", {"number": 1, "words": [3]}),
        ("add", {"number": 3, "words": [1, 2]}),
        ("add", {"number": 9, "words": [3, 1, 2]}),
    ]
    smallest = minimize(CounterMachine, trace, Invariant.POOL_PARTITION)
    assert smallest is not None
    assert smallest.machine.subject.program(smallest.violation) == (
        f"from {__name__} import Counter\n\n"
        "counter = Counter(num_blocks=1, block_size=1)\n"
        "result = counter.add(5, [])\n"
        "assert result < 5\n"
    )


class WholeBlocks(CounterMachine):
    """Fails where the words fill blocks of 16."""

    def check(self) -> None:
        words = self.trace[-1][1].get("words")
        if words and len(words) % 16 == 0:
            raise Violation(Invariant.POOL_PARTITION, f"{len(words)} words", "assert False")


@pytest.mark.parametrize("num_words", [32, 48, 112])
def test_a_prompt_of_whole_blocks_becomes_one_block(num_words: int) -> None:
    trace = [
        ("start", {"num_blocks": 8, "block_size": 16}),
        ("add", {"number": 3, "words": [0] * num_words}),
    ]
    smallest = minimize(WholeBlocks, trace, Invariant.POOL_PARTITION)
    assert smallest is not None
    assert smallest.trace[-1] == ("add", {"number": 3, "words": [0] * 16})


def test_what_does_not_happen_again_cannot_be_made_smaller() -> None:
    assert minimize(CounterMachine, [("start", {"num_blocks": 1, "block_size": 1})], Invariant.POOL_PARTITION) is None


def subject() -> Subject:
    return Subject(Counter, "counter", num_blocks=1, block_size=1)


def program(act: Callable[[Subject], Any]) -> list[str]:
    """Return the calls of a program that ends in a violation."""
    made = subject()
    with pytest.raises(Violation) as caught:
        act(made)
    return made.program(caught.value).splitlines()[3:]


def test_a_call_that_raises_ends_the_program() -> None:
    assert program(lambda made: made.do(Invariant.ROOM, "fail")) == ["counter.fail()  # raises"]
    assert program(lambda made: made.ask(Invariant.ROOM, "fail")) == ["counter.fail()  # raises"]


def test_an_error_that_is_right_does_not_end_the_program() -> None:
    def act(made: Subject) -> None:
        assert isinstance(made.error_of("fail"), ValueError)
        made.do(Invariant.POOL_PARTITION, "add", 1, words=[])
        raise Violation(Invariant.POOL_PARTITION, "wrong", "assert expected", "expected = counter.total > 1")

    assert program(act) == [
        "try:",
        "    counter.fail()",
        "except Exception as error:",
        "    print(error)",
        "expected = counter.total > 1",
        "counter.add(1, words=[])  # 1",
        "assert expected",
    ]


def test_a_finding_says_which_invariant_and_how() -> None:
    error = PropertyError(PropertyFinding.of(Violation(Invariant.LIVE_BLOCKS, "block 1 is free"), "manager.free(0)\n"))
    assert str(error) == (
        "H092: block 1 is free\n  where:    invariant 4: A live table never points at a free block\n\nmanager.free(0)\n"
    )


def test_an_adapter_without_its_methods_is_refused() -> None:
    with pytest.raises(HarnessError, match="lacks allocate") as caught:
        Subject(Counter, "counter", required=("add", "allocate"), num_blocks=1, block_size=1)
    assert caught.value.code is Code.BAD_ADAPTER
