"""Clients and workers around one store whose clock moves only when a test moves it."""
