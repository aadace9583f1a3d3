"""One prompt continued by an installed engine, through what its adapter offers."""

from collections.abc import Iterator, Sequence

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.checkpoint import read_table


def continue_prompt(
    name: str,
    checkpoint: Checkpoint,
    prompt: Sequence[int],
    *,
    dtype: str,
    device: str,
    options: dict[str, str],
    max_new_tokens: int,
) -> Iterator[tuple[int, str | None]]:
    """Open the engine now, and return an iterator over the new tokens, each with why it is the last one, if it is.

    The tokens are the likeliest ones; an end-of-sequence token of the checkpoint is the last one.

    Raises:
        HarnessError: as `open_engine`; BAD_OPTION; ENGINE_LACKS_METHOD.
    """
    from harness.engines import open_engine
    from harness.engines.stepping import Continuation

    if max_new_tokens < 1:
        raise HarnessError(
            Code.BAD_OPTION, "no token is asked for", where="--max-new-tokens", expected="at least 1",
            actual=max_new_tokens,
        )  # fmt: skip
    engine = open_engine(name, checkpoint.folder, dtype=dtype, device=device, options=options)
    continuation = Continuation(engine, max_num_tokens=len(prompt) + max_new_tokens, max_num_seqs=1)
    steps = continuation.steps([prompt], [max_new_tokens])
    return _tokens(name, steps, max_new_tokens, _end_tokens(checkpoint))


def _tokens(
    engine: str, steps: Iterator[Sequence[tuple[int, int]]], num_wanted: int, ends: frozenset[int]
) -> Iterator[tuple[int, str | None]]:
    number = 0
    for token in (token for step in steps for _, token in step):
        number += 1
        if token in ends:
            yield token, "eos"
            return
        yield token, "length" if number == num_wanted else None
        if number == num_wanted:
            return
    raise HarnessError(
        Code.ENGINE_FAILED, "the engine ended without an end-of-sequence token and made fewer tokens than asked for",
        where=engine, expected=f"{num_wanted} tokens", actual=number,
    )  # fmt: skip


def _end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the end-of-sequence tokens that generation_config.json names, or else config.json."""
    path = checkpoint.folder / "generation_config.json"
    configs = [read_table(path)[0]] if path.is_file() else []
    named = (config.get("eos_token_id") for config in (*configs, checkpoint.config))
    ends = next((ids for ids in named if ids is not None), ())
    return frozenset([ends] if isinstance(ends, int) else ends)
