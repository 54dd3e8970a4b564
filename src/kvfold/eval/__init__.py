"""Evaluation: tasks, metrics, runs that can be resumed, statistics."""
