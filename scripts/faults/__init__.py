"""The parts of scripts/fault_test.py: commands, what is injected into them, and what must hold then."""
