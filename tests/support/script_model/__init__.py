"""A world of clients and workers around one store, whose clock moves only when told to."""
