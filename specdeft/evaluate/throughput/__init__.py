"""Tokens per second of several ways to decode, on the same prompts, in turns, in one run."""
