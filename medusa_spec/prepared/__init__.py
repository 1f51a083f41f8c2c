"""Parts of a frozen target made fast for decoding on CPU, one kind of module a file; see `medusa_spec.prepare`."""
