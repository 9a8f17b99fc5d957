"""The code that runs in the pool, before and after the body of a task."""
