"""Stop strings: where one completes, and how much of the text may not be shown yet because one may be on its way.

Promises  a stop string that spans tokens is found however the tokens were grouped; what is held back is exactly the longest tail that is
          still a proper prefix of a stop string, so nothing leaks and nothing waits that is already certain. (vLLM holds back the longest
          stop string's length less one, always: the same text in the end, later.)
Cost      of a search: the new characters and one stop string's length before them, never the whole text.

On the way down of form 9, called for every update of a request with `stop`.    vLLM: v1/engine/detokenizer.py::check_stop_strings
"""

from collections.abc import Callable, Sequence

StopChecker = Callable[[str, int, list[str], bool], tuple[str, int] | None]  #: what the seam text.stop must provide


def check_stop_strings(output_text: str, new_char_count: int, stop: list[str], include_in_output: bool) -> tuple[str, int] | None:
    """The stop string that completes first within the last `new_char_count` characters, and the length to cut `output_text` to.

    First means by its end, as if the characters came one by one; of two that end together, the one earlier in the list. The cut is where
    the stop string starts, or ends with `include_in_output`; -1 when the text ends there anyway. None when there is no match.
    """
    if not new_char_count:
        return None
    found: tuple[int, int, str] | None = None  # end, start, stop string
    for candidate in stop:
        # A match that ends before the new characters was looked for last time: start where the last one character is new.
        start = output_text.find(candidate, max(len(output_text) - new_char_count - len(candidate) + 1, 0))
        if start != -1 and (found is None or start + len(candidate) < found[0]):
            found = start + len(candidate), start, candidate
    if found is None:
        return None
    end, start, match = found
    if not include_in_output:
        return match, start
    return match, -1 if end == len(output_text) else end


def held_back(output_text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `output_text` may still turn out to be the start of a stop string.

    Monotone: text that was once free stays free, since a prefix of a stop string's prefix is a prefix too.
    """
    longest = 0
    for candidate in stop:
        start = output_text.find(candidate[0], max(len(output_text) - len(candidate) + 1, 0))
        while start != -1 and not candidate.startswith(output_text[start:]):
            start = output_text.find(candidate[0], start + 1)
        if start != -1:
            longest = max(longest, len(output_text) - start)
    return longest
