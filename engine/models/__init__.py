"""Native model code: flat rows in, hidden states out. Knows no requests and no schedules."""
