"""The parts of the documentation that are generated."""
