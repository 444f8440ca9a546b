"""Runs that a foreign command trains: started, followed and recorded as if our own trainer had made them."""
