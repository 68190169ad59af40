"""What LangBot finds in this plugin."""
