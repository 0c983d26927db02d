"""Token ids to text as it streams: no half characters, stop strings found the token they complete."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Decodes ids one by one so that the pieces add up to the decoding of the whole.

    A byte-level token may hold a part of a character: text is held back while it ends in the replacement character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # ids before it are decoded for good; kept as left context up to here
        self._read = 0  # ids up to here have given their text
        self.text = ""

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))

    def push(self, token: int) -> str:
        """Take one id; return the text that became certain (may be empty)."""
        self._ids.append(token)
        return self._advance(flush=False)

    def flush(self) -> str:
        """What is held back: the end of the sequence makes it certain."""
        return self._advance(flush=True)

    def _advance(self, flush: bool) -> str:
        known = self._decode(self._ids[self._start : self._read])
        grown = self._decode(self._ids[self._start :])
        if grown.endswith("\ufffd") and not flush:
            return ""
        piece = grown[len(known) :]
        self._start, self._read = self._read, len(self._ids)
        self.text += piece
        return piece


class StopStrings:
    """Finds the first stop string in growing text, and how much of the text can be shown before one is ruled out."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in self._stops), default=0)

    def find(self, text: str, since: int = 0) -> int | None:
        """Where the first stop string begins that ends behind ``since``, or None."""
        begin = max(0, since - self._longest + 1)
        found = [at for at in (text.find(stop, begin) for stop in self._stops) if at >= 0]
        return min(found, default=None)

    def safe(self, text: str) -> int:
        """The length of the text that no later token can turn into a part of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return len(text) - length
        return len(text)
