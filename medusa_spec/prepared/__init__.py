"""Parts of a frozen target made fast for decoding on CPU, one kind of module a file; `medusa_spec.prepare` uses them."""
