"""An answer as a pure state machine: no I/O, no thread, no clock."""
