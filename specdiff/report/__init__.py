"""Showing what was measured: terminal tables and one HTML page."""
