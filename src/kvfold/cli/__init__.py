"""The command line: one file per command; what a command needs is imported when it runs."""
