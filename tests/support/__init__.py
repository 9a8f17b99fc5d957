"""Helpers that tests share: waiting, real workers, servers."""
