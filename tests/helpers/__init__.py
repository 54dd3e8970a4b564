"""Shared test code: tiny random models of many families, and oracles that share no code with the library."""
