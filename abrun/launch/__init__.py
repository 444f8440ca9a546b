"""From a plan to processes: `experiment` prepares the directory, one module an engine runs it there."""
