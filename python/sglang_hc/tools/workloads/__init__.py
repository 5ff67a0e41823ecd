"""What users ask of a server, as recorded in the field's public trace formats."""
