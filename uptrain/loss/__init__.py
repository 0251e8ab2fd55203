"""Losses over tokens, computed in chunks below the head of the model."""
