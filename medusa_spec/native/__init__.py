"""Kernels in C, compiled on the user's machine at first use; everything works without them, more slowly."""
