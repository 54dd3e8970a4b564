"""Storage: who holds the bytes of a cache, how rows enter and leave, and how they are read."""
