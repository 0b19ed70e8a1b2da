"""What is said of errors alone: the chain of those that one was raised from."""

from __future__ import annotations

import pytest

from thunder_norm.errors import chain_of


def test_a_cause_that_is_raised_again_while_what_carried_it_is_handled_ends_the_chain():
    cause, carrier = ValueError("cause"), KeyError("carrier")
    with pytest.raises(ValueError) as met:
        try:
            raise carrier from cause
        except KeyError as e:
            assert e.__cause__ is not None
            raise e.__cause__ from None
    assert list(chain_of(met.value)) == [cause, carrier]


def test_a_chain_follows_causes_before_contexts():
    try:
        try:
            raise ValueError("inner")
        except ValueError:
            raise KeyError("outer") from TypeError("cause")
    except KeyError as e:
        assert [type(found) for found in chain_of(e)] == [KeyError, TypeError]
    assert list(chain_of(None)) == []
