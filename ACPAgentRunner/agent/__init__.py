"""The ACP driver: how this package talks to any Agent Client Protocol agent."""
