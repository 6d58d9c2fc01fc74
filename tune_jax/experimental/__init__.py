"""What may still change between versions, and names that scripts of other tuners import from here."""
