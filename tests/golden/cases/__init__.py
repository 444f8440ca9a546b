"""The cases of the corpus, by what they are about."""
