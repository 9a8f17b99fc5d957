"""The operations of operators: they read and change locks."""
