"""The runner component and its form."""
