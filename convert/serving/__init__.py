"""How serving engines handle results: which of them run a result, and how they distribute few KV heads."""
