"""The real world: the same ports on Ray actors, placement groups and SGLang servers."""
