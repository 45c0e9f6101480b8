"""Contracts that every package shares: records, constraints, settings, errors, logging. Knows no torch, no Celery."""
