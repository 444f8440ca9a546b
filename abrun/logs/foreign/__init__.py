"""The door for foreign data: folders, files, texts, tables, databases and messages of strangers.

Only this package opens what a stranger wrote. Links do not lead out of the given folder, work and memory are
bounded by the size of the file, and a value of another type than expected is None.
"""
