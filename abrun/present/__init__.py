"""How results look: tables, Markdown, figures and the console, the same wherever they are shown."""
