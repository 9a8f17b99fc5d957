"""What tests share: waiting, real workers."""
