"""The trainer: a program that abrun starts as a process, and that writes a run directory."""
