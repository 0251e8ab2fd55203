"""Exact rewrites of model types without a KV-head setting into native types that have one."""
