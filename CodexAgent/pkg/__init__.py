"""What the three runner packages share; vendored byte-identically, edited only in ``ACPAgentRunner``."""
