"""A prompt in the words of the checkpoint's chat template."""

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import HFTokenizer


def chat_token_ids(text: str, tokenizer: HFTokenizer) -> list[int]:
    """Return the tokens of one user's message, up to where the assistant's answer begins.

    Raises:
        HarnessError: NO_TOKENIZER; NO_CHAT_TEMPLATE: the tokenizer has none, or it does not take the message.
    """
    if not tokenizer.hf.chat_template:
        raise HarnessError(
            Code.NO_CHAT_TEMPLATE, "the tokenizer has no chat template", where=tokenizer.folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            hint="leave --chat away: a base model continues plain text",
        )  # fmt: skip
    messages = [{"role": "user", "content": text}]
    try:
        token_ids = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template may raise whatever it likes
        raise HarnessError(
            Code.NO_CHAT_TEMPLATE, f"the chat template cannot be applied: {error}", where=tokenizer.folder,
            expected="a template that takes one message of a user",
        ) from error  # fmt: skip
    return [int(token_id) for token_id in token_ids]
