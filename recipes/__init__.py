"""Recipes: one validated YAML file that says how to convert, uptrain and compare."""
