"""Data and job verbs: plans, rows, prompts, results, parts, finishing. Knows no torch and no engine."""
