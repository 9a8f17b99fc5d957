"""The thread of the main process that talks to Redis and to the broker."""
