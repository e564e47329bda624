"""What collectives and computing cost in seconds: numbers in, numbers out, the same on every rank."""
