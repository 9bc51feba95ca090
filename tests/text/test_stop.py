"""Stop strings: first by their end, found whatever the grouping, and never a character held back in vain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.text.stop import check_stop_strings, held_back

TEXT = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "new", "stop", "include", "expected"),
    [
        ("hello STOP", 4, ["STOP"], False, ("STOP", 6)),
        ("hello STOP", 4, ["STOP"], True, ("STOP", -1)),
        ("hello STOP it", 7, ["STOP"], True, ("STOP", 10)),
        ("hello STOP it", 2, ["STOP"], False, None),  # ended before the new characters
        ("hello STOP", 1, ["STOP"], False, ("STOP", 6)),  # only its last character is new
        ("a long end", 10, ["long end", "on"], False, ("on", 3)),  # the one that ends first, not the one that starts first
        ("xab", 3, ["ab", "b"], False, ("ab", 1)),  # both end at 3: list order
        ("xab", 3, ["b", "ab"], False, ("b", 2)),
        ("abab", 4, ["ab"], False, ("ab", 0)),
        ("ab", 0, ["ab"], False, None),
        ("ab", 2, [], False, None),
    ],
)
def test_examples(text, new, stop, include, expected):
    assert check_stop_strings(text, new, stop, include) == expected


@given(TEXT, st.data(), STOPS, st.booleans())
def test_equals_looking_at_every_end_in_order(text, data, stop, include):
    new = data.draw(st.integers(0, len(text)))
    expected = None
    for end in range(len(text) - new + 1, len(text) + 1):
        first = next((s for s in stop if text[:end].endswith(s)), None)
        if first is not None:
            cut = end if include else end - len(first)
            expected = first, (-1 if include and end == len(text) else cut)
            break
    assert check_stop_strings(text, new, stop, include) == expected


@given(TEXT, STOPS)
def test_held_back_is_the_longest_tail_that_may_become_a_stop_string(text, stop):
    tails = [n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stop)]
    assert held_back(text, stop) == max(tails)


@given(TEXT, TEXT, STOPS)
def test_text_once_free_stays_free(text, more, stop):
    assert len(text) - held_back(text, stop) <= len(text + more) - held_back(text + more, stop)
