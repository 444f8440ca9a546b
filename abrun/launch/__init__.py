"""Launches: start the runs of a plan, watch over them and end them."""
