"""Presentation of results: tables, Markdown, figures and the console."""
