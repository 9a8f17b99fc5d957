"""The contract is complete: each method of a store has a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from celery_singleton_lock.store.base import LockStore, MessageStore, ReplicaStore, WorkerStore

pytestmark = pytest.mark.contract

PROTOCOLS = (LockStore, MessageStore, WorkerStore, ReplicaStore)
VERBS = sorted({name for each in PROTOCOLS for name in vars(each) if not name.startswith("_")})

FILES = (
    "test_store.py",
    "test_revoke.py",
    "test_store_modes.py",
    "test_data_loss.py",
    "test_store_probe.py",
    "test_timed_close.py",
)


def called(*files: str) -> set[str]:
    """Return what those files of this folder call on something named ``store``."""
    found = set()
    for file in files:
        tree = ast.parse(Path(__file__).with_name(file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found |= {node.attr} if node.value.id == "store" else set()
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_store_is_in_the_contract(verb):
    """A verb that another store could get wrong unnoticed is no part of a contract."""
    assert verb in called(*FILES)
