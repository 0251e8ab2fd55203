"""Conversion: fewer KV heads, by mean or by folding, with everything that cannot be done right refused by name."""
