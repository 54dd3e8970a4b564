"""Operations on tensors, one folder each: ``api`` validates and dispatches, ``reference`` is plain torch."""
