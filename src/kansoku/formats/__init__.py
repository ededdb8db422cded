"""Bytes to records and back: the file formats of the field and our own. Import the modules."""
