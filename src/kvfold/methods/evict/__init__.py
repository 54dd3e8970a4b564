"""Methods that decide for good which tokens stay, one per file."""
