"""Parts of scripts/fault_test.py: processes, the commands under test, the property, the faults."""
