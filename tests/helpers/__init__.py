"""Shared test code: tiny random models of many families, and oracles computed in another way than the code under test."""
