"""Memory that no live row may depend on, by its kinds; without torch."""

from enum import StrEnum


class Memory(StrEnum):
    """Memory that no live row may depend on."""

    UNUSED = "unused cache", "blocks of no request, and places after a request's last token"
    PADDING = "padded rows", "rows of a step that are no request's"
    OTHERS = "another request", "keys, values and states of another request"
    SCRATCH = "scratch", "what torch allocates without setting it"

    help: str

    def __new__(cls, word: str, text: str) -> "Memory":
        """Make a member whose value is its name."""
        member = str.__new__(cls, word)
        member._value_, member.help = word, text
        return member
