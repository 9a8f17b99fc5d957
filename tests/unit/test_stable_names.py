"""Names that must stay the same in all versions: two versions share one Redis."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_name_template import compile_name


def settle(account_id, amount=0, *, note="none"):
    """A task."""


def name_of(*args, key=None, only=None, **kwargs):
    return compile_name("shop.settle", settle, lock_key=key, lock_args=only).name(args, kwargs)


@pytest.mark.parametrize(
    ("declared", "args", "name"),
    [
        ({}, (42,), "shop.settle:46e25360dc80d5b59184e4ca4248e569"),
        ({}, ("é\ud800", 1.5), "shop.settle:a0c20e45cec229a260ba897b8644ea56"),
        (
            {"key": "account:{account_id!h}"},
            ("secret",),
            "account:2bb80d537b1da3e38bd30361aa855686",
        ),
        ({"key": "100%:{account_id}-{note}"}, (2**63,), "100%:9223372036854775808-none"),
        ({"key": "a:{account_id}"}, (-(2**63),), "a:-9223372036854775808"),
        ({"only": ["account_id", "note"]}, ("x",), 'shop.settle:"x","none"'),
    ],
)
def test_T31_a_name_is_the_same_in_every_version(declared, args, name):
    """Digests too: what is digested is written as it always was."""
    assert name_of(*args, **declared) == name


@pytest.mark.parametrize("declared", [{}, {"key": "a:{account_id}"}, {"only": ["account_id"]}])
def test_numbers_that_differ_behind_the_point_have_different_names(declared):
    """Only whole ones are written as such."""
    names = {name_of(number, **declared) for number in (0, 0.25, 0.5, 1, 1.5, -0.5)}
    assert len(names) == 6
    assert name_of(1.0, **declared) == name_of(1, **declared)


class Odd:
    """A callable whose signature Python cannot see."""

    __signature__ = "none"

    def __call__(self, account_id, amount, *, note):
        return f"odd:{account_id}:{note}"


def test_a_callable_that_shows_no_signature_is_taken_at_its_word():
    """What it cannot take is seen when it is called."""
    assert name_of(7, key=Odd()) == "odd:7:none"
