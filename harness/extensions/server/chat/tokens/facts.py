"""What HF's own template does, which whoever follows it does as well."""

from collections.abc import Iterator

from harness.extensions.server.chat.tokens.conversations import Conversation, Feature, samples
from harness.extensions.server.chat.tokens.rendering import Renderer


def template_notes(renderer: Renderer) -> Iterator[str]:
    """Yield what is worth knowing of a template."""
    user = Conversation(messages=({"role": "user", "content": "x"},))
    plain, without = renderer.render(user), renderer.render(user, has_prompt=False)
    assert plain is not None
    bos = renderer.tokenizer.hf.bos_token_id
    if bos is not None and plain.token_ids.count(bos) != 1:
        yield f"HF's own rendering has BOS {plain.token_ids.count(bos)} times"
    if without is not None and without == plain:
        yield "the template has no generation prompt"
    taken = [text for text in renderer.special.values() if _is_taken(renderer, text)]
    if taken:
        yield f"a user who writes {', '.join(map(repr, taken[:4]))} writes the special token, by HF's own rendering"
    for feature in (Feature.HISTORY, Feature.REASONING):
        if _changes_past(renderer, samples()[feature]):
            yield f"a later turn changes how earlier ones are rendered ({feature}): no prefix cache helps there"


def _is_taken(renderer: Renderer, text: str) -> bool:
    plain, with_text = (
        renderer.render(Conversation(messages=({"role": "user", "content": content},))) for content in ("x", f"x{text}")
    )
    if plain is None or with_text is None:
        return False
    return sum(map(renderer.special.__contains__, with_text.token_ids)) > sum(
        map(renderer.special.__contains__, plain.token_ids)
    )


def _changes_past(renderer: Renderer, conversation: Conversation) -> bool:
    """Whether the rendering up to the last turn is no beginning of the whole."""
    before = renderer.render(conversation.changed(*conversation.messages[:-1]), has_prompt=False)
    whole = renderer.render(conversation)
    if before is None or whole is None:
        return False
    return whole.token_ids[: len(before.token_ids)] != before.token_ids
