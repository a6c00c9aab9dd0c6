"""StopStrings: the end of a text at a string of the caller's choice, whole or not at all."""

from __future__ import annotations


class StopStrings:
    """Passes a text on piece by piece, up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is decided. Of several stop strings the one
    that is complete first counts, and of those that are complete together the longest: how the text is cut into pieces
    does not matter.

    Args:
        strings: Each at least one character; none at all passes everything on.

    Attributes:
        found: The text has ended; nothing more is passed on.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def push(self, piece: str, *, last: bool) -> str:
        """Take a piece and return what is certain to come before any stop string; with `last`, all that is left."""
        if self.found:
            return ""
        if not self._strings:
            return piece
        text = self._held + piece
        at = self._find(text)
        if at is None:
            at = len(text) if last else self._undecided(text)
        else:
            self.found = True
        self._held = "" if self.found else text[at:]
        return text[:at]

    def _find(self, text: str) -> int | None:
        """Where the first stop string begins."""
        found = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        return min(found)[1] if found else None

    def _undecided(self, text: str) -> int:
        """Where that end of the text begins which may be the beginning of a stop string."""
        for at in range(len(text)):
            tail = text[at:]
            if any(string.startswith(tail) for string in self._strings):
                return at
        return len(text)
