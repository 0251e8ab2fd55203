"""Recipes: validated YAML files that say how to convert, uptrain and compare."""
