"""A verdict for people: figures, the page, markdown, the terminal."""
