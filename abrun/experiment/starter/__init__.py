"""Getting started: built-in recipes, `abrun init`, and the JSON schema for editors."""
