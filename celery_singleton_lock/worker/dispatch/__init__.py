"""Dispatches, parks and acknowledges messages in the main process. Does no I/O."""
