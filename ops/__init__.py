"""Entry points for operators: doctor, benchmarks, deployment files."""
