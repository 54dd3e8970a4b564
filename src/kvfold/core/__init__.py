"""Vocabulary of the house: budgets, policies, method interfaces, errors. Imports torch alone."""
