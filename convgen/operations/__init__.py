"""Operations: a row of a table each. What one says: signatures, local code, a reference; never a word about ranks."""
