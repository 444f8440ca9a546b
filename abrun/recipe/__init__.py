"""Recipes: what an experiment is, as strict models, and how a YAML file becomes one."""
