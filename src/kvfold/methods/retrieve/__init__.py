"""Methods that choose what a query reads."""
