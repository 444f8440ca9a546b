"""Runs of a foreign trainer's command: started, followed and recorded like runs of abrun's own trainer."""
