"""What is fastest: measurements and choices, which outlive answers. Pure: no I/O, no thread, no clock."""
