"""Locks in code: ``Lock``, ``AsyncLock``, and what is built on them."""
