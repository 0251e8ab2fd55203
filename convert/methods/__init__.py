"""How a group of KV heads becomes one: the table of methods and their mathematics."""
