"""The draws of chats, after what a hypothesis's template makes of them."""

from dataclasses import replace
from pathlib import Path

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.extensions.server.chat.tokens.conversations import Conversation
from harness.extensions.server.chat.tokens.rendering import Renderer
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.sampler.draws import Draws
from harness.formats.checkpoint import Checkpoint, HFTokenizer


def renderer_of(checkpoint: Checkpoint, template: Path | None) -> Renderer:
    """Return what renders chats by a file of jinja2, or by the checkpoint's own template.

    Raises:
        HarnessError: as `HFTokenizer.load` and `Renderer`; BAD_OPTION: the file cannot be read.
    """
    tokenizer = HFTokenizer.load(checkpoint.folder)
    if template is not None:
        try:
            tokenizer.hf.chat_template = read_text(template)
        except (OSError, UnicodeDecodeError) as error:
            what, expected = f"the chat template cannot be read: {error}", "a file of jinja2"
            raise HarnessError(Code.BAD_OPTION, what, where=template, expected=expected) from None
    return Renderer(tokenizer)


def rendered(draws: Draws, renderer: Renderer, names: TokenNames) -> Draws:
    """Return the same draws in the same order, each after the tokens that its chat is rendered to.

    Raises:
        HarnessError: BAD_TEMPLATE: the template refuses a chat.
    """
    prompts: dict[int, tuple[int, ...]] = {}
    found = {}
    for request, draw in draws.values():
        if request.number not in prompts:
            (message,) = request.messages(names)
            own = renderer.render(Conversation(messages=(message,)))
            if own is None:
                what = f"the chat template refuses a chat: {renderer.refusal}"
                raise HarnessError(Code.BAD_TEMPLATE, what, where="--hypotheses", actual=message["content"])
            prompts[request.number] = own.token_ids
        prompt = prompts[request.number]
        after = replace(draw, past=replace(draw.past, prompt=prompt))
        found[request.number, len(prompt) + draw.step - 1] = (replace(request, prompt=prompt), after)
    return found
