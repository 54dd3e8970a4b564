"""Methods that split a budget over layers and heads, one per file."""
