"""Scores of one method over the tasks."""
