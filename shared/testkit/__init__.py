"""What the suites share and no package ships."""
