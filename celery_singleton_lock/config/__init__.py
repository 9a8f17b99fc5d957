"""Settings, options and arguments: parsed, checked and frozen."""
