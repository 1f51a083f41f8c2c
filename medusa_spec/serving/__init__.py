"""What other engines run of this library: files that are copied beside exported heads and need no installation."""
